"""Tiny omni-modal models of the real architecture for Relax."""
