"""A starting point for a Relax plugin."""
