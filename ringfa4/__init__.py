"""ringfa4: ring attention (see README.md)."""
