"""A server's model gets new weights as a list of copies, noted the first time: the bits are those of its own loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relax_plugin_sglang.processes.relax_replay import Replay, repair

Weights = list[tuple[str, Tensor]]


class Fused(nn.Module):
    """As a server's models are: q and k in one parameter, experts in another, one that is a shard, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(6, 3), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(2, 4, 3), requires_grad=False)
        self.padded = nn.Parameter(torch.zeros(5, 3), requires_grad=False)
        self.columns = nn.Parameter(torch.zeros(3, 4), requires_grad=False)
        self.rest = nn.Parameter(torch.ones(3), requires_grad=False)
        self.shard = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.scale = nn.Buffer(torch.zeros(()))
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.loads += 1
        done = set()
        for name, tensor in weights:
            kind, _, number = name.partition(".")
            if kind in ("q", "k"):
                self.qk.data.fill_(0) if kind == "q" else None  # before what comes: the order counts
                self.qk.data.narrow(0, 0 if kind == "q" else 4, len(tensor)).copy_(tensor)
            elif kind == "expert":
                for half, rows in enumerate(tensor.chunk(2)):
                    self.experts.data[int(number)][2 * half : 2 * half + 2].copy_(rows)
            elif kind == "columns":  # what is written is not contiguous, and what is read is the same again and again
                self.columns.data[:, :2].copy_(tensor)
                self.columns.data[:, 2:].copy_(tensor[0].expand(3, 2))
            elif kind == "shard":
                self.rest.data.zero_()
                self.shard.data.copy_(tensor[:, 2:])
            elif kind == "embed":
                self.padded.data[: len(tensor)].copy_(tensor)
                self.padded.data[len(tensor) :].fill_(7)
            else:
                self.scale.copy_(tensor)
            done.add(name)
        return done


def weights(
    number: int, names: Iterable[str] = ("q", "k", "expert.0", "expert.1", "shard", "scale", "embed", "columns")
) -> Weights:
    """In one buffer, each at a place of its own, as they come."""
    shapes = {
        "columns": (3, 2),
        "embed": (4, 3),
        "q": (4, 3),
        "k": (2, 3),
        "expert.0": (4, 3),
        "expert.1": (4, 3),
        "shard": (4, 4),
        "scale": (),
    }
    flat = torch.randn(200, generator=torch.Generator().manual_seed(number))
    found, at = [], number % 7
    for name in names:
        size = torch.Size(shapes[name]).numel()
        found.append((name, flat[at : at + size].view(shapes[name])))
        at += size + number % 3
    return found


def replaying(model: Any) -> Replay:
    replay = Replay(model, model.load_weights)
    model.load_weights = replay
    return replay


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_second_time_the_loader_is_not_asked_and_the_bits_are_its_own() -> None:
    model, plain = Fused(), Fused()
    replaying(model)
    for number in range(1, 6):
        wanted = plain.load_weights(weights(number))
        for lost in (model.padded, model.rest):  # as memory that was given back
            lost.data.fill_(-1)
        with torch.inference_mode(number % 2 == 0):  # a server loads in that
            assert model.load_weights(weights(number)) == wanted
        for name, tensor in state(plain).items():
            assert torch.equal(model.state_dict()[name], tensor), (number, name)
    assert model.loads == 1


def test_other_lists_are_noted_by_themselves() -> None:
    model, plain = Fused(), Fused()
    replaying(model)
    for number, names in enumerate([("q", "k"), ("expert.0", "shard"), ("q", "k"), ("k", "q"), ("q", "k")]):
        model.load_weights(weights(number, names))
        plain.load_weights(weights(number, names))
        assert all(torch.equal(model.state_dict()[n], t) for n, t in state(plain).items())
    assert model.loads == 3
    model.load_weights([(n, t.double()) for n, t in weights(9, ("q", "k"))])  # converted by the copy
    plain.load_weights(weights(10, ("q", "k")))
    model.load_weights([(n, t.double()) for n, t in weights(10, ("q", "k"))])
    assert model.loads == 4 and torch.equal(model.qk, plain.qk)


def test_a_model_whose_memory_moved_is_loaded_in_its_own_way() -> None:
    model = Fused()
    replaying(model)
    model.load_weights(weights(1))
    model.qk.data = torch.zeros(6, 3)
    model.load_weights(weights(2))
    assert model.loads == 2 and torch.equal(model.qk[:4], weights(2)[0][1])


def test_files_are_loaded_one_after_the_other() -> None:
    model = Fused()
    replaying(model)
    for number in (1, 2):
        model.load_weights(pair for pair in weights(number))
    assert model.loads == 2


def scaled(model: Fused, given: Weights) -> None:
    for _, tensor in given:
        model.qk.data.copy_(tensor * 2)


def added(model: Fused, given: Weights) -> None:
    for _, tensor in given:
        model.qk.data.copy_(tensor)
        model.qk.data.add_(1)


def elsewhere(model: Fused, given: Weights) -> None:
    for _, tensor in given:
        torch.zeros(6, 3).copy_(tensor)


def left_out(model: Fused, given: Weights) -> None:
    """As when a loader's threads copy, which nobody sees."""
    model.qk.data[:1].copy_(given[0][1][:1])


def replaced(model: Fused, given: Weights) -> None:
    for half, (_, tensor) in enumerate(given):
        model.qk.data[3 * half : 3 * half + 3].copy_(tensor[:3])
    model.qk.data = model.qk.data.clone()


def viewed(model: Fused, given: Weights) -> None:
    for half, (_, tensor) in enumerate(given):
        model.qk.data[3 * half : 3 * half + 3].copy_(tensor[:3].view(torch.int32))


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (scaled, "copies what it has computed"),
        (added, "calls aten.add_"),
        (elsewhere, "writes to what is no parameter"),
        (left_out, "nothing was seen of b"),
        (replaced, "a tensor of the model got other memory"),
        (viewed, "reads a as another dtype"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_always_asked(
    load: Callable[[Fused, Weights], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, calls = Fused(), []

    def counted(given: Weights) -> None:
        calls.append(len(given))
        load(model, given)

    replay = Replay(model, counted)
    for number in range(3):
        replay([("a", torch.full((6, 3), number + 1.0)), ("b", torch.full((6, 3), number + 5.0))])
    assert calls == [2, 2, 2]
    (record,) = caplog.records
    assert why in record.getMessage()


def test_every_model_that_a_runner_loads_gets_it() -> None:
    class Runner:
        def load_model(self) -> str:
            self.model: Any = Fused()
            return "loaded"

    repair(Runner)
    runner = Runner()
    assert runner.load_model() == "loaded"
    for number in (1, 2, 3):
        runner.model.load_weights(weights(number))
    assert runner.model.loads == 1
