"""New weights get into a server's model as a list of copies, in SGLang's interpreter.

A model's ``load_weights`` finds the place of one tensor after the other by its name, while the server stands still.
Which copies a list of weights led to is noted the first time, and done again at once when a list of the same names,
shapes and dtypes comes. A loading that does anything but copy (quantization, say), or that leaves a weight out, is
never repeated so.
"""

from __future__ import annotations

import bisect
import functools
import itertools
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


@dataclass(frozen=True)
class Copy:
    """Into ``target``, from a view of a weight: its number in the list, and where in it the view lies, in elements."""

    target: torch.Tensor
    weight: int
    offset: int
    strides: tuple[int, ...]

    def source(self, weights: Named) -> torch.Tensor:
        tensor = weights[self.weight][1]
        return tensor.as_strided(self.target.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Plan:
    """All copies of a list of weights. ``places``: where the model's tensors were; ``result``: of ``load_weights``.

    ``fills``: what gets a number instead, such as the rows of an embedding beyond the vocabulary.
    """

    copies: Sequence[Copy]
    fills: Sequence[tuple[torch.Tensor, float]]
    places: tuple[int, ...]
    result: Any


class Replay:
    """In place of a model's ``load_weights``."""

    def __init__(self, model: torch.nn.Module, load: Callable[..., Any]) -> None:
        self.model, self.load = model, load
        self.plans: dict[Any, Plan | None] = {}
        """None: this list is loaded in the model's own way."""

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]], *more: Any, **named: Any) -> Any:
        if more or named or not isinstance(weights, (list, tuple)):  # such as a file's, one after the other
            return self.load(weights, *more, **named)
        key = tuple((name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for name, tensor in weights)
        if key not in self.plans:
            return self._first(key, weights)
        plan = self.plans[key]
        if plan is None or plan.places != places(self.model):
            return self.load(weights)
        with torch.inference_mode():
            for target, value in plan.fills:
                target.fill_(value)
            torch._foreach_copy_([copy.target for copy in plan.copies], [copy.source(weights) for copy in plan.copies])
        for device in {copy.target.device for copy in plan.copies}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the weights are somebody else's memory, who waits for our answer
        return plan.result

    def _first(self, key: Any, weights: Named) -> Any:
        before, notes = places(self.model), Notes(self.model, weights)
        with notes:
            result = self.load(weights)
        problem = next(notes.problems(), None)
        if problem is None and before != places(self.model):
            problem = "a tensor of the model got other memory"
        if problem is not None:
            _log.warning("relax: each update loads the weights one by one, not at once: %s", problem)
        if len(self.plans) >= _KEPT:
            self.plans.clear()
        self.plans[key] = None if problem is not None else Plan(notes.copies, notes.fills, before, result)
        return result


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a loading does with the memory of ``weights``."""

    def __init__(self, model: torch.nn.Module, weights: Named) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights
        self.copies: list[Copy] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        self._other: str | None = None
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in _tensors(model)}
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, i) for i, (_, t) in enumerate(weights) if t.nbytes)
        self._starts, self._spans = [start for start, _, _ in spans], spans

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            self._filled(args[0], args[1])
        elif func is torch.ops.aten.zero_.default:
            self._filled(args[0], 0)
        elif func._schema.is_mutable:
            self._other = self._other or f"the model's loader calls {func}"
        return result

    def _filled(self, target: torch.Tensor, value: float) -> None:
        if not self._ours(target):
            self._other = self._other or "the model's loader fills what is no parameter"
        elif target.nbytes:
            self.fills.append((target.detach(), value))

    def _ours(self, target: torch.Tensor) -> bool:
        return target.is_contiguous() and target.untyped_storage().data_ptr() in self._storages

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not target.nbytes:
            return
        found = bisect.bisect_right(self._starts, source.data_ptr()) - 1
        start, end, weight = self._spans[found] if found >= 0 else (0, 0, 0)
        tensor = self.weights[weight][1]
        size = source.element_size()
        reach = sum((n - 1) * stride for n, stride in zip(source.shape, source.stride(), strict=True))
        if not start <= source.data_ptr() <= source.data_ptr() + reach * size < end:
            self._other = self._other or "the model's loader copies what it has computed"
        elif not self._ours(target):
            self._other = self._other or "the model's loader copies to where it has no parameter"
        elif source.dtype != tensor.dtype or source.shape != target.shape or not tensor.is_contiguous():
            self._other = self._other or f"{self.weights[weight][0]} is not copied as it is"
        else:
            offset = (source.data_ptr() - start) // size
            self.copies.append(Copy(target.detach(), weight, offset, source.stride()))

    def problems(self) -> Iterator[str]:
        """Why what was noted is not all that happened."""
        if self._other is not None:
            yield self._other
        used = {copy.weight for copy in self.copies}
        for i, (name, tensor) in enumerate(self.weights):
            if i not in used and tensor.nbytes:
                yield f"nothing was seen of {name}"
        targets = [copy.target for copy in self.copies] + [target for target, _ in self.fills]
        spans = sorted((target.data_ptr(), target.data_ptr() + target.nbytes) for target in targets)
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                yield "two weights go to the same place"


def places(model: torch.nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in _tensors(model))


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def repair(kind: Any) -> None:
    """Let the models that ``kind`` (ModelRunner) loads take new weights so."""
    original = kind.load_model

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.model.load_weights = Replay(self.model, self.model.load_weights)
        return result

    kind.load_model = load_model
