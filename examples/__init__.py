"""Small applications that use Postbus; the guides in docs/guide show parts of them."""
