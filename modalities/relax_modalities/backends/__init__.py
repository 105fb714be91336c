"""Decoder backends, one module each; a module imports its library and is itself imported on first use."""
