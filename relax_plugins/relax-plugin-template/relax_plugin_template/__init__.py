"""The plugin template of Relax."""
