"""The embedded engine and trainer on PyTorch and transformers. Only ``config`` is light; import the rest where a role is built."""
