"""Run files: reading, overriding, validating and describing them."""
