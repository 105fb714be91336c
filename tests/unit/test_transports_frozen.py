"""Tensors that training cannot change: each receiver reads them once, and again only when they changed all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.interfaces import Transport
from relax_core.testing.engines import decoder_of, request, serving
from relax_core.torch.engine import TorchEngine
from relax_core.torch.optim import named_tensors
from relax_core.torch.swap import adopt_weights, check_weights, take_weights
from relax_core.transports import BroadcastTransport, CopyTransport, SharedTransport, TcpTransport
from relax_core.types import Version
from relax_core.weight_receiver import Receiver
from relax_core.weights import WeightUpdate

KINDS: list[type[Transport]] = [CopyTransport, SharedTransport, TcpTransport, BroadcastTransport]
FROZEN = frozenset({"tower", "other"})


@pytest.fixture(params=KINDS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = request.param(request.param.Config())
    yield made
    made.close()


def weights(number: int, tower: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "embed": torch.full((300,), float(number)),
        "tower": torch.full((5000,), tower),
        "head": torch.full((7,), -float(number)),
        "other": torch.full((3, 3), tower).bfloat16(),
    }


def publish(transport: Transport, number: int, tower: float = 1.0, lineage: int = 0) -> WeightUpdate:
    return transport.publish(Version(lineage, number), weights(number, tower).items(), FROZEN)


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: set[str]) -> None:
    assert set(found) == names
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_the_manifest_lists_all_and_a_late_joiner_gets_all(transport: Transport) -> None:
    for n in range(3):
        update = publish(transport, n)
        assert [i.name for i in update.manifest.tensors] == list(weights(n))
        assert all(i.checksum is not None for i in update.manifest.tensors)
        assert update.manifest.nbytes == sum(t.nbytes for t in weights(n).values())
        check(dict(update.tensors()), weights(n), set(weights(n)))


def test_who_holds_the_base_reads_the_rest(transport: Transport) -> None:
    first, second = publish(transport, 0), publish(transport, 1)
    assert first.base is not None
    assert second.base is first.base
    check(dict(second.tensors(held=first.base.id)), weights(1), {"embed", "head"})


def test_other_bits_make_another_base_and_equal_bits_of_a_new_lineage_do_not(transport: Transport) -> None:
    first = publish(transport, 5)
    again = publish(transport, 2, lineage=1)
    changed = publish(transport, 3, tower=2.0, lineage=1)
    assert first.base is not None
    assert again.base is first.base
    assert changed.base is not None
    assert changed.base.id != first.base.id
    check(dict(changed.tensors(held=first.base.id)), weights(3, 2.0), set(weights(3)))
    check(dict(again.tensors()), weights(2), set(weights(2)))  # the former base is still there
    third = publish(transport, 4, tower=3.0, lineage=1)
    check(dict(third.tensors()), weights(4, 3.0), set(weights(4)))
    back = publish(transport, 5, tower=1.0, lineage=2)  # the first one was given up: published anew
    check(dict(back.tensors()), weights(5), set(weights(5)))


def test_a_receiver_pulls_the_frozen_bytes_once() -> None:
    transport, receiver = TcpTransport(TcpTransport.Config()), Receiver()
    sent = []
    for n in range(3):
        before = transport.sent
        update = publish(transport, n)
        found = dict(receiver.receive(update))
        assert receiver.kept(update) == (FROZEN if n else frozenset())
        check(found, weights(n), set(weights(n)) - receiver.kept(update))
        receiver.took(update, adopted=False)
        sent.append(transport.sent - before)
    moving, frozen = 2 * 4096, 6 * 4096  # padded to rows of 4096 bytes
    assert sent == [moving + frozen, moving, moving]
    receiver.close()
    dict(receiver.receive(update))
    assert transport.sent - sum(sent) == moving + frozen
    transport.close()


def test_bytes_are_counted_before_their_receiver_has_them() -> None:
    transport, receiver = TcpTransport(TcpTransport.Config()), Receiver()
    update = publish(transport, 0)
    for n in range(300):
        dict(receiver.receive(update))
        assert transport.sent == (n + 1) * 8 * 4096
    receiver.close()
    transport.close()


def test_an_update_that_was_not_taken_leaves_the_base_unread() -> None:
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver()
    receiver.receive(publish(transport, 0))  # and then its model refused them
    check(dict(receiver.receive(publish(transport, 1))), weights(1), set(weights(1)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2).bfloat16())


def test_missing_names_are_refused_unless_they_are_held() -> None:
    model, given = Model(), [("a", torch.ones(3))]
    with pytest.raises(WeightsError, match="1 of this model's parameters are missing, first 'b'"):
        check_weights(model, given)
    with pytest.raises(WeightsError, match="first 'b'"):
        check_weights(model, given, frozenset({"c"}))
    take_weights(model, given, frozenset({"b"}))
    assert model.a.tolist() == [1, 1, 1]
    assert model.a is not given[0][1]
    given[0][1].zero_()
    assert model.a.tolist() == [1, 1, 1]


def test_adopted_weights_are_the_very_tensors_where_the_dtype_is_the_models() -> None:
    model, a, b = Model(), torch.ones(3), torch.ones(2)
    adopt_weights(model, [("a", a), ("b", b)])
    assert model.a.data_ptr() == a.data_ptr()
    assert model.b.dtype == torch.bfloat16
    assert model.b.tolist() == [1, 1]


def test_an_engine_takes_the_moving_part_and_keeps_the_rest() -> None:
    async def test(e: TorchEngine) -> None:
        model = decoder_of(e).model
        named = [(name, t.clone()) for name, t in named_tensors(model)]
        frozen = frozenset(name for name, _ in named[: len(named) // 2])
        transport = TcpTransport(TcpTransport.Config())
        sent = []
        for n in range(1, 4):
            new = [(name, t if name in frozen else t + n) for name, t in named]
            await e.load_weights(transport.publish(Version(0, n), new, frozen))
            sent.append(transport.sent)
            assert all(torch.equal(dict(named_tensors(model))[name], t) for name, t in new)
            assert set((await e.generate(request(f"r{n}", [3, 4], 4))).versions) == {Version(0, n)}
        assert sent[2] - sent[1] == sent[1] - sent[0] < sent[0]
        await e.stop()
        await e.start()  # its own weights: nothing is held
        await e.load_weights(transport.publish(Version(1, 4), new, frozen))
        assert all(torch.equal(dict(named_tensors(decoder_of(e).model))[name], t) for name, t in new)
        assert transport.sent - sent[2] >= sent[0]
        transport.close()

    serving(test)


def test_weights_are_received_while_decoding_goes_on() -> None:
    """The receiver hangs in ``fill`` until tokens have been drawn: it would hang for ever on the loop's thread."""

    async def test(e: TorchEngine) -> None:
        transport = CopyTransport(CopyTransport.Config())
        named = [(name, t + 1) for name, t in named_tensors(decoder_of(e).model)]
        update = transport.publish(Version(0, 1), named)
        running = asyncio.create_task(e.generate(request("r", [3, 4], 60)))
        slow = WeightUpdate(update.manifest, cast(Any, Slow(update.handle, e)))
        await e.load_weights(slow)
        done = await running
        assert set(done.versions) == {Version(0, 0), Version(0, 1)}
        assert done.versions == sorted(done.versions)
        transport.close()

    serving(test, max_rows=2)


class Slow:
    device = "cpu"

    def __init__(self, handle: Any, engine: TorchEngine) -> None:
        self.handle, self.engine = handle, engine

    def fill(self, out: torch.Tensor, start: int, links: Any) -> Iterator[int]:
        import time

        end = time.monotonic() + 30
        drawn = decoder_of(self.engine).drawn
        while decoder_of(self.engine).drawn < drawn + 5:
            assert time.monotonic() < end, "nothing was decoded while weights came"
            time.sleep(0.001)
        yield from self.handle.fill(out, start, links)
