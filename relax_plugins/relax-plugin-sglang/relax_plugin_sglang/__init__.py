"""The engine ``sglang`` of Relax: an SGLang server, in its own virtual environment, behind the core's interface."""
