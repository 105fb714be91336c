"""Transports: copies that survive what happens to either side, and buffers whose damage is seen."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, cast

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.interfaces import Transport
from relax_core.transports import BroadcastTransport, CopyTransport, SharedTransport, TcpTransport
from relax_core.types import Version
from relax_core.weight_sums import checksum
from relax_core.weights import WeightUpdate

KINDS: list[type[Transport]] = [CopyTransport, SharedTransport, TcpTransport, BroadcastTransport]


@pytest.fixture(params=KINDS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = request.param(request.param.Config())
    yield made
    made.close()


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, 3, generator=generator).bfloat16(),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "one": torch.tensor(2.5),
        "ids": torch.arange(9),
    }


def publish(transport: Transport, number: int, weights: dict[str, torch.Tensor]) -> WeightUpdate:
    return transport.publish(Version(1, number), weights.items())


def damage(transport: Transport, update: WeightUpdate, position: int) -> None:
    """Flip a bit of the publisher's newest buffer."""
    handle = cast(Any, update.handle)
    if not isinstance(transport, SharedTransport):
        cast(Any, transport)._flats[-1].buffer[position] ^= 16
    else:
        memory = SharedMemory(handle.name)
        assert memory.buf is not None
        memory.buf[position] ^= 16
        memory.close()


def test_tensors_arrive_bit_for_bit_with_their_manifest(transport: Transport) -> None:
    weights = some_weights()
    update = publish(transport, 3, weights)
    assert update.manifest.version == Version(1, 3)
    assert update.manifest.nbytes == sum(t.nbytes for t in weights.values())
    assert [(i.name, i.shape, i.dtype) for i in update.manifest.tensors] == [
        ("embed", (7, 5), "float32"),
        ("half", (3, 3), "bfloat16"),
        ("turned", (6, 4), "float32"),
        ("one", (), "float32"),
        ("ids", (9,), "int64"),
    ]
    assert [i.checksum for i in update.manifest.tensors] == [checksum(t) for t in weights.values()]
    received = dict(update.tensors())
    assert list(received) == list(weights)
    for name, tensor in received.items():
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])


def test_nothing_is_an_alias(transport: Transport) -> None:
    weights = some_weights()
    update = publish(transport, 0, weights)
    original = {name: t.clone() for name, t in weights.items()}
    for tensor in weights.values():
        tensor.zero_()
    first = dict(update.tensors())
    for tensor in first.values():
        tensor.fill_(1)  # a receiver may do what it likes with its own
    assert all(torch.equal(t, original[name]) for name, t in update.tensors())


def test_the_last_two_publications_stay_readable(transport: Transport) -> None:
    updates = [publish(transport, n, some_weights(n)) for n in range(3)]
    for n in (1, 2):
        assert all(torch.equal(t, some_weights(n)[name]) for name, t in updates[n].tensors())
    with pytest.raises(WeightsError, match=r"weights embed: checksum \w{32}, the manifest says \w{32}|does not hold"):
        list(updates[0].tensors())


@pytest.mark.parametrize("position", [0, 100, 4096, 8200])
def test_an_altered_buffer_is_refused_with_the_tensors_name(transport: Transport, position: int) -> None:
    update = publish(transport, 0, some_weights())
    damage(transport, update, position)
    name = ["embed", "half", "turned"][position // 4096]
    with pytest.raises(WeightsError, match=f"weights {name}: checksum"):
        list(update.tensors())


def test_a_manifest_of_another_model_is_refused(transport: Transport) -> None:
    update = publish(transport, 0, some_weights())
    longer = update.manifest.tensors[-1]._replace(shape=(4000,))
    wrong = replace(update, manifest=replace(update.manifest, tensors=(*update.manifest.tensors[:-1], longer)))
    with pytest.raises(WeightsError, match=r"weights: the buffer has \d+ bytes, its manifest says"):
        list(wrong.tensors())


def test_without_checksums_the_bits_arrive_unverified(transport: Transport) -> None:
    unsummed = type(transport)(type(transport).Config.model_validate({"checksums": False}))
    weights = some_weights()
    update = publish(unsummed, 0, weights)
    assert [info.checksum for info in update.manifest.tensors] == [None] * 5
    assert all(torch.equal(t, weights[name]) for name, t in update.tensors())
    damage(unsummed, update, 0)
    assert len(dict(update.tensors())) == 5
    unsummed.close()


def test_publications_may_change_size(transport: Transport) -> None:
    for n, size in enumerate((10, 5000, 20, 70_000, 0)):
        weights = {"w": torch.full((size,), float(n))}
        update = publish(transport, n, weights)
        assert all(torch.equal(t, weights[name]) for name, t in update.tensors())


def test_a_used_buffer_leaves_nothing_behind_a_smaller_tensor(transport: Transport) -> None:
    for n, size in enumerate((64, 64, 3, 3)):  # all of them take one row
        weights = {"w": torch.full((size,), 1.5)}
        update = publish(transport, n, weights)
        assert update.manifest.tensors[0].checksum == checksum(weights["w"])


def test_a_large_publication_is_received_in_parts(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.weights._BUCKET", 9000)
    weights = {f"w{i}": torch.randn(n) for i, n in enumerate((10, 300, 5, 5, 900, 64))}
    update = publish(transport, 0, weights)
    assert all(torch.equal(t, weights[name]) for name, t in update.tensors())


# --- shared memory ----------------------------------------------------------------------------------------------------


needs_listing = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory cannot be listed here")


def segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def receive(connection: Connection) -> None:
    """In another process: take updates and answer with their checksums; None ends it."""
    while (update := connection.recv()) is not None:
        try:
            connection.send({name: checksum(tensor) for name, tensor in update.tensors()})
        except WeightsError as error:
            connection.send(str(error))


@needs_listing
def test_other_processes_receive_and_may_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()  # of the segments made here: other programs of this machine have some, too

    class Noted(SharedMemory):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            names.add(self.name)

    monkeypatch.setattr("relax_core.transports.shared.SharedMemory", Noted)
    transport, context = SharedTransport(SharedTransport.Config()), get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=receive, args=(there,), daemon=True)
    process.start()
    for n in range(3):
        update = publish(transport, n, some_weights(n))
        here.send(update)
        assert here.recv() == {i.name: i.checksum for i in update.manifest.tensors}
    damage(transport, update, 0)
    here.send(update)
    assert here.recv().startswith("weights embed: checksum")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    update = publish(transport, 3, some_weights(3))  # the publisher goes on
    assert all(torch.equal(t, some_weights(3)[name]) for name, t in update.tensors())
    assert len(names & segments()) == 2
    transport.close()
    assert not names & segments()
    with pytest.raises(WeightsError, match=r"shared memory psm_\w+ cannot be opened .* publish the weights again"):
        list(update.tensors())


def test_an_update_is_small_and_picklable() -> None:
    transport = SharedTransport(SharedTransport.Config())
    weights = {"w": torch.randn(100_000)}
    message = pickle.dumps(publish(transport, 0, weights))
    assert len(message) < 1000
    assert torch.equal(dict(pickle.loads(message).tensors())["w"], weights["w"])
    transport.close()


PUBLISHER = """
    import pickle, signal, sys, os, torch
    from relax_core.transports import SharedTransport
    from relax_core.types import Version
    transport = SharedTransport(SharedTransport.Config())
    update = transport.publish(Version(0, 0), [("w", torch.ones(1000))])
    print(update.handle.name, flush=True)
    {end}
"""


@needs_listing
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt"])
def test_the_memory_goes_with_its_publisher_however_that_ends(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PUBLISHER.format(end=end))], capture_output=True, text=True, timeout=60
    )
    name = done.stdout.strip()
    assert name.startswith("psm_"), done.stderr
    assert name not in segments()  # the tracker process ends after its publisher, and run() waits for both


def test_a_stranger_process_leaves_the_memory_in_place() -> None:
    """A receiver that was not started by the publisher has a resource tracker of its own, which must free nothing."""
    transport = SharedTransport(SharedTransport.Config())
    update = publish(transport, 0, some_weights())
    code = "import pickle, sys; print(len(list(pickle.loads(sys.stdin.buffer.read()).tensors())))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(update), capture_output=True, timeout=60)
    assert done.stdout.split() == [b"5"], done.stderr
    assert done.stderr == b""
    assert len(list(update.tensors())) == 5
    transport.close()


@needs_listing
def test_closing_leaves_no_memory_where_a_tensor_still_looks_at_it() -> None:
    transport = SharedTransport(SharedTransport.Config())
    update = publish(transport, 0, some_weights())
    (segment,) = transport._segments
    assert isinstance(segment, SharedMemory)
    held = torch.frombuffer(segment.buf, dtype=torch.uint8)
    transport.close()
    assert cast(Any, update.handle).name not in segments()
    assert held.numel() >= update.manifest.nbytes
