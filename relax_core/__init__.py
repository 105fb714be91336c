"""Relax: reinforcement learning for omni-modal language models and agents.

Importing this package is cheap: torch, transformers and numpy are loaded only where a role is built.
"""

from relax_core._version import __version__

__all__ = ["__version__"]
