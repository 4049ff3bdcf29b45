"""Examples, to be run from a checkout."""
