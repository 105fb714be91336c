"""Graders in processes of their own: a pool with deadlines, and the worker that it starts."""
