"""New weights get into a server's model as a list of copies, in SGLang's interpreter.

A model's ``load_weights`` finds the place of one tensor after the other by its name, while the server stands still.
Which copies a list of weights led to is noted the first time, and done again at once when a list of the same names,
shapes and dtypes comes. A loading that does anything but copy (quantization, say), or that leaves a weight out, is
never repeated so.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_log = logging.getLogger("relax")
_KEPT = 64
"""Lists of weights that are remembered: an update may come in pieces."""

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Copy:
    """Into ``target``, from a view of a weight: its number in the list, and where in it the view lies, in elements."""

    target: torch.Tensor
    weight: int
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]

    def do(self, weights: Named) -> None:
        tensor = weights[self.weight][1]
        self.target.copy_(tensor.as_strided(self.size, self.strides, tensor.storage_offset() + self.offset))


@dataclass(frozen=True, slots=True)
class Fill:
    """Of ``target`` with a number, as of an embedding's rows beyond the vocabulary."""

    target: torch.Tensor
    value: float

    def do(self, weights: Named) -> None:
        self.target.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a list of weights led to, in order. ``places``: where the model's tensors were; ``result``: of
    ``load_weights``."""

    steps: Sequence[Copy | Fill]
    places: list[int]
    result: Any


class Replay:
    """In place of a model's ``load_weights``."""

    def __init__(self, model: torch.nn.Module, load: Callable[..., Any]) -> None:
        self.load = load
        self.plans: dict[Any, Plan | None] = {}
        """None: this list is loaded in the model's own way."""
        self._owned = [owned for module in model.modules() for owned in (module._parameters, module._buffers)]

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]], *more: Any, **named: Any) -> Any:
        if more or named or not isinstance(weights, (list, tuple)):  # such as a file's, one after the other
            return self.load(weights, *more, **named)
        key = tuple((name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for name, tensor in weights)
        if key not in self.plans:
            return self._first(key, weights)
        plan = self.plans[key]
        if plan is None or plan.places != self._places():
            return self.load(weights)
        with torch.inference_mode():
            for step in plan.steps:
                step.do(weights)
        for device in {step.target.device for step in plan.steps}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the weights are somebody else's memory, who waits for our answer
        return plan.result

    def _first(self, key: Any, weights: Named) -> Any:
        before, notes = self._places(), Notes(weights, {t.untyped_storage().data_ptr() for t in self._tensors()})
        with notes:
            result = self.load(weights)
        problem = notes.problem()
        if problem is None and before != self._places():
            problem = "a tensor of the model got other memory"
        if problem is not None:
            _log.warning("relax: each update loads the weights by their names, which takes longer: %s", problem)
        if len(self.plans) >= _KEPT:
            self.plans.clear()
        self.plans[key] = None if problem is not None else Plan(notes.steps, before, result)
        return result

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors()]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for owned in self._owned:
            for tensor in owned.values():
                if tensor is not None:
                    yield tensor


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a loading does: copies from ``weights`` to a model's memory, ``storages``."""

    def __init__(self, weights: Named, storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.storages = weights, storages
        self.steps: list[Copy | Fill] = []
        self._problem: str | None = None
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, (_, t) in enumerate(weights) if t.nbytes)
        self._starts, self._spans = [start for start, _, _ in spans], spans

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args[0].nbytes:
            self._problem = self._problem or self._noted(func, *args)
        return result

    def _noted(self, func: Any, target: torch.Tensor, value: Any = 0, *more: Any) -> str | None:
        """Why a step is none that can be done again with other weights."""
        aten = torch.ops.aten
        if func not in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default):
            return f"the model's loader calls {func}"
        if target.untyped_storage().data_ptr() not in self.storages:
            return "the model's loader writes to what is no parameter"
        if func is not aten.copy_.default:
            self.steps.append(Fill(target.detach(), value))
            return None
        found = bisect.bisect_right(self._starts, value.data_ptr()) - 1
        start, end, weight = self._spans[found] if found >= 0 else (0, 0, 0)
        reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        if not start <= value.data_ptr() <= value.data_ptr() + reach * value.element_size() < end:
            return "the model's loader copies what it has computed"
        name, tensor = self.weights[weight]
        if value.dtype != tensor.dtype:
            return f"the model's loader reads {name} as another dtype"
        offset = (value.data_ptr() - start) // value.element_size()
        self.steps.append(Copy(target.detach(), weight, offset, tuple(value.shape), value.stride()))
        return None

    def problem(self) -> str | None:
        """Why what was noted is not all that happened."""
        used = {step.weight for step in self.steps if isinstance(step, Copy)}
        unseen = [name for i, (name, tensor) in enumerate(self.weights) if i not in used and tensor.nbytes]
        return self._problem or (f"nothing was seen of {unseen[0]}" if unseen else None)


def repair(kind: Any) -> None:
    """Let the models that ``kind`` (ModelRunner) loads take new weights so."""
    original = kind.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.model.load_weights = Replay(self.model, self.model.load_weights)
        return result

    kind.load_model = load_model
