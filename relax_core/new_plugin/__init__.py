"""``relax new-plugin``: a working, tested distribution of one's own, rendered from the files beside this module."""
