"""A trainer whose gradients are caught, over a tiny model that bans some words: for tests of trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from relax_core.config.schema import SamplingSection
from relax_core.hookspecs import Callback, OptimizerEvent
from relax_core.interfaces import ModelAdapter, Row
from relax_core.run import Run
from relax_core.testing.tiny import TinyAdapter, tiny_adapter
from relax_core.testing.training import row, tiny_run, tiny_trainer

if TYPE_CHECKING:
    import numpy as np
    import torch

    from relax_core.torch.layout import Kind
    from relax_core.torch.trainer import TorchTrainer

KINDS: tuple[Kind, ...] = ("shared", "packed", "padded")
BANS = (4, 9, 17)


class Banning(TinyAdapter):
    """Bans some words too, so that bans matter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.banned_token_ids = (*self.banned_token_ids, *BANS)


def banning(**settings: Any) -> Banning:
    plain = tiny_adapter(**settings)
    return Banning(plain.config, plain.media)


def rows_of_lengths(lengths: Sequence[int], prompts: int = 3, seed: int = 0) -> list[Row]:
    """Replies of these lengths to a few prompts; one has an observation in it, two are samples of one trajectory."""
    import numpy as np

    draw = np.random.default_rng(seed)
    starts = [draw.integers(5, 30, 3 + 2 * i).tolist() for i in range(prompts)]
    allowed = [i for i in range(3, 30) if i not in BANS]
    made = []
    for i, n in enumerate(lengths):
        mask = [1] * n
        if i == len(lengths) - 1 and n > 4:
            mask[2:4] = [0, 0]
        reply = draw.choice(allowed, n).tolist()
        made.append(row(f"g{i % prompts}/{i}", starts[i % prompts], reply, mask, advantage=float(draw.normal())))
    return made


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Of the update that was about to happen, caught before the optimizer used it."""
    caught = cast(Catch, trainer.run.stack.callbacks["catch"])
    assert caught.gradients, "no update happened"
    return caught.gradients.pop()


class Catch(Callback):
    """Keeps each update's gradient and event."""

    def __init__(self) -> None:
        self.trainer: TorchTrainer | None = None
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.events: list[OptimizerEvent] = []

    def before_optimizer_step(self, run: Run, event: OptimizerEvent) -> None:
        assert self.trainer is not None
        found = self.trainer.learner.module.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in found if p.grad is not None})
        self.events.append(event)


def caught(adapter: ModelAdapter | None = None, temperature: float = 1.0, **settings: Any) -> TorchTrainer:
    """A trainer without clipping whose gradients are caught."""
    run = tiny_run(sampling=SamplingSection(temperature=temperature))
    catch = Catch()
    run.stack.add_callback(catch, "catch")
    trainer = tiny_trainer(adapter, run=run, **{"clip": None, **settings})
    catch.trainer = trainer
    return trainer


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name


def plain_logprobs(adapter: TinyAdapter, r: Row, temperature: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """From the plain transformers model, one row at a time."""
    import numpy as np
    import torch

    model = adapter.load("cpu", torch.float32)
    ids = torch.tensor(r.columns["tokens"].tolist())
    with torch.no_grad():
        logits = cast(Any, model)(input_ids=ids[None]).logits[0, :-1] / temperature
    logits[:, list(adapter.banned_token_ids)] = -1e9
    picked = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    found = np.concatenate([[0], picked]).astype(np.float32)
    return np.where(r.columns["mask"], found, 0).astype(np.float32)
