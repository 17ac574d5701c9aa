"""Three tables of a shop, mirrored to a lake and joined there."""
