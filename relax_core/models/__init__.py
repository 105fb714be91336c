"""Model adapters of the core and what adapters share. Only ``config`` may be imported without torch."""
