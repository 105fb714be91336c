"""Checks that a plugin author runs in three lines, and what the tests share."""
