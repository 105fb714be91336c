"""Loaded into a server by SGLang's settings for further models and processors: it reads the features that Relax sends.

It runs in the server's interpreter, and imports nothing of Relax.
"""
