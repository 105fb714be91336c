"""Settings of the overlap benchmark's engine and trainer; apart from their code, so that they import no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_core.torch.config import EngineConfig, TrainerConfig


class MeteredEngineConfig(EngineConfig):
    log: str
    """A file to which a line is added at each new version of the weights, and at the end."""


class MeteredTrainerConfig(TrainerConfig):
    log: str
    """A file to which a line is added after each step."""
    rest_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds of each step that it rests, computing nothing, in the place of its work; null: it works."""
