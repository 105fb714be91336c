"""The receiver's memory: used again, never under the feet of a model that has adopted it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.transports import CopyTransport, SharedTransport
from relax_core.types import Version
from relax_core.weight_receiver import Receiver
from relax_core.weights import WeightUpdate


def publish(transport: Any, number: int) -> WeightUpdate:
    update: WeightUpdate = transport.publish(Version(0, number), [("w", torch.full((1000,), float(number)))])
    return update


def place(found: list[tuple[str, torch.Tensor]]) -> int:
    return found[0][1].data_ptr()


def test_copied_weights_come_into_the_same_memory_again() -> None:
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver()
    places = []
    for n in range(3):
        update = publish(transport, n)
        places.append(place(receiver.receive(update)))
        receiver.took(update, adopted=False)
    assert len(set(places)) == 1


def test_adopted_weights_are_left_alone_and_two_memories_take_turns() -> None:
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver()
    places, living = [], torch.zeros(0)
    for n in range(5):
        update = publish(transport, n)
        found = receiver.receive(update)
        assert living.tolist() == [float(n - 1)] * len(living)
        places.append(place(found))
        receiver.took(update, adopted=True)
        living = found[0][1]
    assert places[0] == places[2] == places[4] != places[1] == places[3]


def test_a_failed_receive_does_not_touch_what_the_model_has() -> None:
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver()
    first = publish(transport, 1)
    living = receiver.receive(first)[0][1]
    receiver.took(first, adopted=True)
    for _ in range(3):
        broken = publish(transport, 2)
        transport._flats[-1].buffer[9] ^= 4
        with pytest.raises(WeightsError, match="weights w: checksum"):
            receiver.receive(broken)
        assert living.tolist() == [1.0] * 1000


def test_a_publication_of_another_size_gets_other_memory() -> None:
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver()
    for size in (1000, 10, 70_000, 0):
        update = transport.publish(Version(0, size), [("w", torch.full((size,), 3.0))])
        assert receiver.receive(update)[0][1].tolist() == [3.0] * size
        receiver.took(update, adopted=True)


def test_shared_memory_stays_mapped_and_old_pieces_are_closed() -> None:
    transport, receiver = SharedTransport(SharedTransport.Config()), Receiver()
    updates = [publish(transport, n) for n in range(2)]
    for update in updates:
        receiver.receive(update)
    kept = dict(receiver._links)
    assert len(kept) == 2
    for n in range(2, 4):
        receiver.receive(publish(transport, n))
    assert receiver._links == kept
    others = [SharedTransport(SharedTransport.Config()) for _ in range(5)]
    for other in others:
        receiver.receive(publish(other, 0))
    assert len(receiver._links) == 4
    assert cast(Any, next(iter(kept.values()))).closed
    receiver.close()
    assert not receiver._links
    for each in (transport, *others):
        each.close()
