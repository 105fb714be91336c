"""Toy tasks that a tiny model learns on a CPU in minutes: one look shows where, and only the right call shows what.

A tiny model's vocabulary holds whole words, so a word of it may be a whole tool call: parser, checks and tools are the
real ones. ``python -m relax_plugin_deepeyes.toy`` prints the words that each toy needs, as a run file takes them.
"""
