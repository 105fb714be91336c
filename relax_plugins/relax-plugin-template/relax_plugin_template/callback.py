"""A callback: override the hooks you need; a misspelt one is refused when the run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_core.hookspecs import Callback, StepEnd
from relax_core.interfaces import ComponentConfig

if TYPE_CHECKING:
    from relax_core.run import Run


class Best(Callback):
    """Remembers the step with the best mean reward, also across restarts."""

    class Config(ComponentConfig):
        metric: str = "reward"
        """Which metric is compared."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.best: float | None = None
        self.step = 0

    def on_step_end(self, run: Run, event: StepEnd) -> None:
        value = event.metrics.get(self.config.metric)
        if value is not None and (self.best is None or value > self.best):
            self.best, self.step = value, event.step

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.step = state.get("best"), state.get("step", 0)
