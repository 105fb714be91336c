"""Agents that are programs of their own: they train by talking to an OpenAI-compatible endpoint (docs/agents.md)."""
