"""Environments, toy tasks and rewards."""
