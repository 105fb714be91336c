"""Weights over sockets: pulls that are refused or break off, and groups whose members come, die and hang."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from relax_core.errors import WeightsError
from relax_core.transports import BroadcastTransport, TcpTransport
from relax_core.types import Version
from relax_core.weight_receiver import Receiver
from relax_core.weights import WeightUpdate

SIZE = 300_000


def weights(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((SIZE,), float(number)), "b": torch.arange(1000) + number}


# --- pulls ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tcp() -> Iterator[TcpTransport]:
    transport = TcpTransport(TcpTransport.Config())
    yield transport
    transport.close()


def test_several_connections_bring_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.transports.tcp.BIG", 70_000)
    transport = TcpTransport(TcpTransport.Config(connections=3))
    receiver = Receiver()
    for n in range(3):
        found = dict(receiver.receive(transport.publish(Version(0, n), weights(n).items())))
        assert all(torch.equal(found[name], t) for name, t in weights(n).items())
    assert len(receiver._links) == 3
    receiver.close()
    transport.close()


def test_a_stranger_without_the_token_gets_nothing(tcp: TcpTransport) -> None:
    update = tcp.publish(Version(0, 0), weights(0).items())
    forged = replace(update, handle=replace(cast(Any, update.handle), token=bytes(32)))
    with pytest.raises(WeightsError, match="does not answer"):
        list(forged.tensors())
    assert tcp.sent == 0


def test_it_listens_on_loopback_alone(tcp: TcpTransport) -> None:
    handle = cast(Any, tcp.publish(Version(0, 0), weights(0).items()).handle)
    assert handle.host == "127.0.0.1"
    with pytest.raises(WeightsError, match=r"transport.host: '192.0.2.1' cannot be listened on"):
        elsewhere = TcpTransport(TcpTransport.Config(host="192.0.2.1"))
        elsewhere.publish(Version(0, 0), weights(0).items())


def test_the_store_of_a_group_listens_on_the_same_address_alone() -> None:
    transport = BroadcastTransport(BroadcastTransport.Config(host="127.0.0.2"))
    handle = cast(Any, transport.publish(Version(0, 0), weights(0).items()).handle)
    for port in (handle.store_port, handle.pull.port):
        socket.create_connection(("127.0.0.2", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
    transport.close()


def test_what_was_replaced_or_closed_says_so(tcp: TcpTransport) -> None:
    updates = [tcp.publish(Version(0, n), weights(n).items()) for n in range(3)]
    receiver = Receiver()
    with pytest.raises(WeightsError, match="does not hold this publication any more"):
        receiver.receive(updates[0])
    assert dict(receiver.receive(updates[2]))["b"][0] == 2  # the receiver goes on
    tcp.close()
    with pytest.raises(WeightsError, match=r"publisher at 127.0.0.1:\d+ does not answer"):
        receiver.receive(updates[2])


# --- groups -----------------------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """In another process: take updates, answer with a few numbers of them; None ends it."""
    torch.set_num_threads(1)
    receiver = Receiver(group=True)
    while (update := connection.recv()) is not None:
        try:
            found = dict(receiver.receive(update))
            connection.send((float(found["a"].double().mean()), int(found["b"][3])))
        except WeightsError as error:
            connection.send(str(error))
    receiver.close()


class Member:
    def __init__(self) -> None:
        context = get_context("spawn")
        self.end, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def answer(self) -> object:
        assert self.end.poll(40), "a member hangs"
        return self.end.recv()

    def kill(self, how: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, how)


class Cluster:
    """A publisher and its members."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.transport = BroadcastTransport(BroadcastTransport.Config(**settings))
        self.members = [Member() for _ in range(count)]
        self.number = 0

    def publish(self) -> WeightUpdate:
        self.number += 1
        return self.transport.publish(Version(0, self.number), weights(self.number).items())

    def round(self, *members: Member) -> int:
        """Publish to these, who must get the right bits; how many bytes they pulled over TCP."""
        before = self.transport.pulled
        update = self.publish()
        for member in members:
            member.end.send(update)
        for member in members:
            assert member.answer() == (float(self.number), self.number + 3)
        self.transport.wait()
        return self.transport.pulled - before

    def close(self) -> None:
        self.transport.close()
        for member in self.members:
            member.process.kill()
            member.process.join(10)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(2, timeout_s=3.0, bucket_bytes=100_000)
    yield made
    made.close()


def size() -> int:
    return -(-SIZE * 4 // 4096) * 4096 + 8192


@pytest.mark.timeout(100)
def test_members_pull_first_and_then_get_broadcasts_and_a_late_one_joins(cluster: Cluster) -> None:
    one, other = cluster.members
    assert cluster.round(one) == size()
    assert cluster.transport.members == 0
    assert cluster.round(one) == 0
    assert cluster.transport.members == 1
    assert cluster.round(one, other) == size()  # the late one pulls its first
    assert cluster.round(one, other) == 0
    assert cluster.transport.members == 2
    assert cluster.round(one, other) == 0


@pytest.mark.timeout(100)
def test_a_member_killed_between_two_publications_is_left_out_of_the_next(cluster: Cluster) -> None:
    one, other = cluster.members
    cluster.round(one, other)
    cluster.round(one, other)
    other.kill(signal.SIGKILL)
    other.process.join(10)
    end = time.monotonic() + 10
    while len(cast(Any, cluster.transport)._server.members) == 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.monotonic()
    assert cluster.round(one) == 0  # a new group of those that live
    assert cluster.transport.members == 1
    assert time.monotonic() - began < 3
    assert cluster.round(one) == 0


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_hangs_in_a_broadcast_stops_nobody(cluster: Cluster, how: signal.Signals) -> None:
    one, other = cluster.members
    cluster.round(one, other)
    cluster.round(one, other)
    began = time.monotonic()
    update = cluster.publish()  # both are in this group
    assert time.monotonic() - began < 1
    other.kill(how)
    one.end.send(update)
    assert one.answer() == (float(cluster.number), cluster.number + 3)
    cluster.transport.wait()
    assert time.monotonic() - began < 15
    for _ in range(3):  # the one that is left goes on, and is soon in a group again
        pulled = cluster.round(one)
    assert pulled == 0
    assert cluster.transport.members == 1


@pytest.mark.timeout(60)
def test_an_altered_broadcast_is_refused_with_the_tensors_name(cluster: Cluster) -> None:
    one, _ = cluster.members
    cluster.round(one)
    cluster.round(one)
    update = cluster.publish()
    tensors = update.manifest.tensors
    wrong = tensors[1]._replace(checksum=cast(int, tensors[1].checksum) + 1)
    one.end.send(replace(update, manifest=replace(update.manifest, tensors=(tensors[0], wrong))))
    assert str(one.answer()).startswith("weights b: checksum")
    assert cluster.round(one) == 0
