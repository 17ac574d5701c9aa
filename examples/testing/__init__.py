"""The examples of the testing guide."""
