"""Programs of their own: one runs in the server's interpreter, and none imports anything of ours.

Not beside our modules: a program finds the modules of its own folder first, before those of the standard library.
"""
