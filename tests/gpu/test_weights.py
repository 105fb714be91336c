"""Weights between GPUs and processes: the bits arrive on the device; a dead member of an NCCL group stops nobody."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.transports import BroadcastTransport, CopyTransport, SharedTransport, TcpTransport
from relax_core.types import Version
from relax_core.weight_receiver import Receiver
from relax_core.weight_sums import checksum, checksums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FROZEN = frozenset({"tower"})


def weights(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    made = {
        "embed": torch.randn(1000, 700, generator=generator).bfloat16(),
        "turned": torch.randn(50, 60, generator=generator).t(),
        "one": torch.tensor(2.5 + number),
        "tower": torch.ones(33, 77),
    }
    return {name: tensor.cuda(0) for name, tensor in made.items()}


def test_the_checksum_of_the_device_is_the_processors() -> None:
    for count in (0, 1, 3, 511, 512 * 8, 512 * 8 + 5, 1_000_003):
        tensor = torch.randint(0, 256, (count,), dtype=torch.uint8)
        assert checksum(tensor.cuda()) == checksum(tensor)
    buffer = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    starts = [0, 4096, 4096, 12_288, 16_384, 499_712, 1 << 20]  # 1, 0, 2, 1, 118 and 134 rows
    assert checksums(buffer.cuda(), starts) == checksums(buffer, starts)


@pytest.mark.parametrize("kind", [CopyTransport, SharedTransport, TcpTransport, BroadcastTransport])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_bits_arrive_where_the_receiver_wants_them(kind: Any, device: str) -> None:
    transport, receiver = kind(kind.Config()), Receiver(device=device)
    for n in range(3):
        update = transport.publish(Version(0, n), weights(n).items(), FROZEN)
        found = dict(receiver.receive(update))
        assert set(found) == set(weights(n)) - receiver.kept(update)
        assert ("tower" in found) == (n == 0)
        for name, tensor in found.items():
            assert str(tensor.device) == device
            assert torch.equal(tensor.cpu(), weights(n)[name].cpu())
        receiver.took(update, adopted=True)
    receiver.close()
    transport.close()


def test_an_altered_buffer_on_the_device_is_refused() -> None:
    transport = CopyTransport(CopyTransport.Config())
    update = transport.publish(Version(0, 0), weights(0).items())
    transport._flats[-1].buffer[5] ^= 1
    with pytest.raises(WeightsError, match="weights embed: checksum"):
        Receiver(device="cuda:0").receive(update)


def serve(connection: Connection) -> None:
    torch.cuda.set_device(1)
    receiver = Receiver(group=True, device="cuda:1")
    while (update := connection.recv()) is not None:
        found = receiver.receive(update)
        connection.send({name: checksum(tensor) for name, tensor in found})
        receiver.took(update, adopted=True)
    receiver.close()


@two
@pytest.mark.timeout(180)
def test_nccl_broadcasts_to_another_process_and_survives_its_death() -> None:
    transport = BroadcastTransport(BroadcastTransport.Config(timeout_s=20.0, bucket_bytes=500_000))
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    pulled = []
    for n in range(4):
        before = transport.pulled
        update = transport.publish(Version(0, n), weights(n).items(), FROZEN)
        here.send(update)
        assert here.poll(100), "the receiver hangs"
        found = here.recv()
        assert found == {i.name: i.checksum for i in update.manifest.tensors if n == 0 or i.name != "tower"}
        transport.wait()
        pulled.append(transport.pulled - before)
    assert pulled[0] > 0
    assert pulled[1:] == [0, 0, 0]
    began = time.monotonic()
    update = transport.publish(Version(0, 4), weights(4).items(), FROZEN)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    transport.wait()
    assert time.monotonic() - began < 60
    assert {name for name, _ in update.tensors()} == set(weights(4))  # others still pull it
    for n in range(5, 8):
        update = transport.publish(Version(0, n), weights(n).items(), FROZEN)
        transport.wait()
    assert transport.members == 0
    assert all(torch.equal(t.cpu(), weights(7)[name].cpu()) for name, t in update.tensors())
    transport.close()
