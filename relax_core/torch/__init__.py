"""The embedded engine and trainer on PyTorch and transformers. Only ``config`` is light to import."""
