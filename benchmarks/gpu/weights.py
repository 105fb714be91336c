"""New weights from the trainer's GPU into the engine, beside a bare broadcast of the same bytes.

    python -m benchmarks.gpu.weights [--shapes qwen3-0.6b qwen3-1.7b] [--repeats 8] [--json FILE]     # two GPUs
    python -m benchmarks.gpu.weights --gpus 1 ...                                                      # one

Two GPUs: a process on each. ``bare``: one NCCL broadcast of one flat tensor. ``receiver``: Relax's transport
``broadcast`` into the memory that the embedded engine draws from, with a checksum of every tensor on both sides.
``server``: the same, and on into an SGLang server on that GPU (through the GPU's own memory), which is paused and goes
on. The three take turns. Seconds are counted from the call of ``publish`` until the other side has all; "sent" leaves
out ``publish`` itself, the copy during which the trainer must wait: the broadcast runs beside its next step. The bar:
bare seconds / sent seconds of ``receiver`` is 0.5 or more.

One GPU: ``bare`` is a copy of the same bytes within the GPU; ``receiver``: another process on the same GPU receives a
publication, checksums and all, from where it lies: what that takes beyond ``bare`` ("added") a broadcast adds, too;
``server``: the transport ``copy`` and the server on the same GPU; ``sender``: only the part from our memory into the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from benchmarks.gpu import models, work

if TYPE_CHECKING:
    from torch import Tensor

    from relax_plugin_sglang.engine import SglangEngine

BAR = 0.5
WARM = 3
PATIENCE_S = 180.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = work.parser(__doc__)
    p.add_argument("--gpus", type=int, choices=[1, 2], default=2)
    p.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-1.7b"])
    p.add_argument("--repeats", type=int, default=8, help="measured turns, after three that are not")
    p.add_argument("--bucket", type=int, default=0, help="bucket_bytes of the transport; default: its own")
    a = p.parse_args(words)
    a.prompt, a.new = 16, 16
    return a


def weights_of(shape: str, device: str) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """A model's tensors as views of one flat buffer, for the bare side; what training publishes."""
    import torch

    from relax_core.torch.optim import named_tensors
    from relax_core.transports.snapshot import described
    from relax_core.weights import offsets, views

    named = list(named_tensors(models.random_model(shape, device)))
    infos = described(named)
    starts = offsets(infos)
    flat = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    found = list(zip((i.name for i in infos), views(flat, infos, starts), strict=True))
    for (_, target), (_, tensor) in zip(found, named, strict=True):
        target.copy_(tensor)
    return flat, found


def bare_group(rank: int, port: int, probe: Tensor) -> Any:
    """Of two processes, after its first broadcast."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroupGloo

    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if probe.is_cuda:
        from torch.distributed import ProcessGroupNCCL

        group: Any = ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options())
    else:
        from datetime import timedelta

        group = ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE_S))
    group.broadcast(probe[:1024], 0).wait()
    return group


# --- the engine's side ------------------------------------------------------------------------------------------------


def serve(connection: Any, file: Any, device: str, size: int) -> None:
    """The other process: does what it is told, and says how long that took, or what went wrong."""
    asyncio.run(_serve(connection, file, device, size))


async def _serve(connection: Any, file: Any, device: str, size: int) -> None:
    import torch

    from relax_core.weight_receiver import Receiver

    torch.set_num_threads(1)
    _, _, engine = work.opened(file)
    receiver = Receiver(group=True, device=device)
    flat = torch.zeros(size, dtype=torch.uint8, device=device)
    group: Any = None
    while (message := await asyncio.to_thread(connection.recv)) is not None:
        began = time.perf_counter()
        try:
            match message:
                case "start", _:
                    await engine.start()
                case "join", port:
                    group = bare_group(1, port, flat)
                case "bare", _:
                    group.broadcast(flat, 0).wait()
                case "receiver", update:
                    receiver.receive(update)
                    receiver.took(update, adopted=True)
                case "server", update:
                    await engine.load_weights(update)
            work.settle(device)
            connection.send(time.perf_counter() - began)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
    receiver.close()
    await engine.stop()


# --- the trainer's side -----------------------------------------------------------------------------------------------


class Other:
    """The process on the engine's device, as the trainer sees it."""

    def __init__(self, file: Path, device: str, size: int) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, file, device, size), daemon=False)
        self.process.start()
        theirs.close()

    def answer(self) -> float:
        if not self.connection.poll(PATIENCE_S * 5):
            raise SystemExit("the engine's process does not answer")
        found = self.connection.recv()
        if isinstance(found, str):
            raise SystemExit(f"the engine's process: {found}")
        return float(found)

    def ask(self, what: str, value: Any) -> float:
        self.connection.send((what, value))
        return self.answer()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(PATIENCE_S)


class Pair:
    """Two processes, and what travels between them."""

    def __init__(self, a: argparse.Namespace, shape: str) -> None:
        from relax_core.transports import BroadcastTransport

        here, there = ("cpu", "cpu") if a.device == "cpu" else ("cuda:0", "cuda:1")
        self.here = here
        self.flat, self.named = weights_of(shape, here)
        file = work.run_file(a, shape, work.engine(a, there), name=f"weights-{shape}")
        self.other = Other(file, there, self.flat.numel())
        settings = {"bucket_bytes": a.bucket} if a.bucket else {}
        self.transports = {
            way: BroadcastTransport(BroadcastTransport.Config(timeout_s=60.0, **settings))
            for way in ("receiver", "server")
        }
        self.number = 0
        self.start_s = self.other.ask("start", None)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.other.connection.send(("join", port))
        self.group = bare_group(0, port, self.flat)
        self.other.answer()

    def bare(self) -> dict[str, float]:
        began = time.perf_counter()
        self.other.connection.send(("bare", None))
        self.group.broadcast(self.flat, 0).wait()
        work.settle(self.here)
        self.other.answer()
        return {"whole": time.perf_counter() - began}

    def moved(self, way: str) -> dict[str, float]:
        from relax_core.types import Version

        self.number += 1
        began = time.perf_counter()
        update = self.transports[way].publish(Version(0, self.number), self.named)
        published = time.perf_counter() - began
        theirs = self.other.ask(way, update)
        whole = time.perf_counter() - began
        pulled = getattr(self.transports[way], "pulled", 0)
        return {"whole": whole, "publish": published, "sent": whole - published, "theirs": theirs, "pulled": pulled}

    def close(self) -> None:
        self.other.close()
        for transport in self.transports.values():
            transport.close()


def two(a: argparse.Namespace, shape: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    pair = Pair(a, shape)
    try:
        found = turns(
            a.repeats,
            {"bare": pair.bare, "receiver": lambda: pair.moved("receiver"), "server": lambda: pair.moved("server")},
        )
    finally:
        pair.close()
    return {"shape": shape, "bytes": pair.flat.numel(), "start_s": pair.start_s}, found


def turns(repeats: int, ways: dict[str, Callable[[], dict[str, float]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(WARM + repeats):
        for way, once in ways.items():
            found.append({"way": way, "turn": number - WARM, **once()})
    return [one for one in found if one["turn"] >= 0]


async def one(a: argparse.Namespace, shape: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trainer and server on one device, both ends in this process."""
    import torch

    from relax_core.transports import CopyTransport
    from relax_core.types import Version
    from relax_core.weight_receiver import Receiver

    device = "cpu" if a.device == "cpu" else "cuda:0"
    flat, named = weights_of(shape, device)
    file = work.run_file(a, shape, work.engine(a), name=f"weights-one-{shape}")
    other_process = Other(file, device, flat.numel())
    _, _, engine = work.opened(file)
    began = time.perf_counter()
    await engine.start()
    about = {"shape": shape, "bytes": flat.numel(), "start_s": time.perf_counter() - began}
    transport, receiver = CopyTransport(CopyTransport.Config()), Receiver(device=device)
    other = torch.empty_like(flat)
    found: list[dict[str, Any]] = []
    try:
        sender = cast("SglangEngine", engine).alive().sender
        for number in range(WARM + a.repeats):
            began = time.perf_counter()
            other.copy_(flat)
            work.settle(device)
            bare = time.perf_counter() - began
            began = time.perf_counter()
            update = transport.publish(Version(0, number + 1), named)
            work.settle(device)
            published = time.perf_counter() - began
            other_process.ask("receiver", update)
            there = time.perf_counter() - began
            began = time.perf_counter()
            await engine.load_weights(update)
            loaded = time.perf_counter() - began
            received = receiver.receive(update)
            work.settle(device)
            began = time.perf_counter()
            await sender.send(received, f"0.{number + 1}")
            alone = time.perf_counter() - began
            receiver.took(update, adopted=False)
            del received
            one = {"turn": number - WARM}
            found += [one | {"way": "bare", "whole": bare}, one | {"way": "sender", "whole": alone}]
            for way, sent in (("receiver", there - published), ("server", loaded)):
                found.append(one | {"way": way, "whole": published + sent, "publish": published, "sent": sent})
    finally:
        other_process.close()
        await engine.stop()
    return about, [one for one in found if one["turn"] >= 0]


def summary(about: dict[str, Any], found: Sequence[dict[str, Any]], barred: bool) -> list[dict[str, Any]]:
    """Medians; ratios of a turn's bare seconds."""
    bare = {one["turn"]: one["whole"] for one in found if one["way"] == "bare"}
    rows = []
    for way in dict.fromkeys(one["way"] for one in found):
        some = [one for one in found if one["way"] == way]
        sent = [one.get("sent", one["whole"]) for one in some]
        ratio = work.median([bare[one["turn"]] / s for one, s in zip(some, sent, strict=True)])
        verdict = f"{BAR} {'reached' if ratio >= BAR else 'missed'}" if barred and way == "receiver" else None
        rows.append(
            {
                "shape": about["shape"],
                "MB": about["bytes"] / 1e6,
                "way": way,
                "whole ms": 1e3 * work.median([one["whole"] for one in some]),
                "publish ms": 1e3 * work.median([one["publish"] for one in some]) if "publish" in some[0] else None,
                "sent ms": 1e3 * work.median(sent),
                "GB/s": about["bytes"] / work.median(sent) / 1e9,
                "added ms": 1e3 * work.median([s - bare[one["turn"]] for one, s in zip(some, sent, strict=True)]),
                "bare/sent": ratio,
                "bare/whole": work.median([bare[one["turn"]] / one["whole"] for one in some]),
                "bar": verdict,
            }
        )
    return rows


async def measure(a: argparse.Namespace) -> None:
    rows, everything = [], []
    for shape in a.shapes:
        about, found = await one(a, shape) if a.gpus == 1 else two(a, shape)
        rows += summary(about, found, a.gpus == 2)
        everything.append(about | {"turns": found})
        print(json.dumps(rows[-3:]), flush=True)  # should a later shape fail
    where = "one GPU" if a.gpus == 1 else "two GPUs"
    work.report(a, f"weights into the engine, {where if a.device == 'cuda' else 'CPU'}", rows, everything)


if __name__ == "__main__":
    work.main(measure, arguments())
