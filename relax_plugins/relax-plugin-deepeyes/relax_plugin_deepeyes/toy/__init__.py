"""Toy tasks that a tiny model learns on a CPU in minutes: a first look shows where, and only the right call shows what.

A tiny model's vocabulary holds whole words, so a word of it may be a whole tool call: parser, checks and tools are the
real ones. Each module lists its toy's words; the run files repeat them.
"""
