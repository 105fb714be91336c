"""Seconds to publish weights to another process: every transport, beside bare copies and a bare gloo broadcast.

    python benchmarks/weights.py [--json FILE] [--sizes 500 2000] [--rounds 3] [--repeats 3] [--device cpu|cuda]

One process publishes, another receives into memory that it holds already. Before every publication the same two
processes do the bare thing with the same bytes: copy one shared tensor in and out, or broadcast one tensor. The ratio
is bare seconds / seconds of such a pair. The whole is counted, from the call of ``publish`` until the receiver has
verified all; a broadcast runs while the trainer goes on, so its bar counts from when ``publish`` returns, and the
column "whole" says what it takes with the copy that comes before. README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.interfaces import Transport
    from relax_core.weight_receiver import Receiver

HERE = Path(__file__).resolve().parent
BARS = {"shared": 0.6, "broadcast": 0.85}
"""At least so many times the bare thing's speed, with checksums."""
WAYS = ("copy", "shared", "tcp", "broadcast")
PATIENCE_S = 120.0


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, help="write every measurement here")
    p.add_argument(
        "--sizes", type=int, nargs="+", default=[500, 2000], help="MB of weights; five times as much is used"
    )
    p.add_argument("--rounds", type=int, default=3, help="turns of each transport, with and without checksums")
    p.add_argument("--repeats", type=int, default=3, help="measured pairs of a turn, after three that are not")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="transports")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the weights are on both sides")
    a = p.parse_args(words)
    if min(a.rounds, a.repeats, *a.sizes) < 1:
        p.error("sizes and counts must be 1 or more")
    return a


def weights_of(megabytes: int, device: str) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Tensors as a model has them, in one flat tensor: embedding and layers in bfloat16, a tower of float32."""
    import torch

    from relax_core.weights import TensorInfo, offsets, views

    bf16, fp32 = "bfloat16", "float32"
    infos = [TensorInfo("embed", (32_000, 1024), bf16, None)]
    layer = {"q": (2048, 1024), "k": (512, 1024), "v": (512, 1024), "o": (1024, 2048), "norm": (1024,)}
    layer |= {"gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072), "other_norm": (1024,)}
    block = {"qkv": (2304, 768), "proj": (768, 768), "in": (3072, 768), "out": (768, 3072), "bias": (768,), "one": (1,)}
    number = 0
    while offsets(infos)[-1] < megabytes * 10**6:
        parts, dtype = (block, fp32) if number % 4 == 3 else (layer, bf16)
        infos += [TensorInfo(f"{number}.{name}", shape, dtype, None) for name, shape in parts.items()]
        number += 1
    starts = offsets(infos)
    flat = torch.randint(0, 256, (starts[-1],), dtype=torch.uint8, device=device)
    return flat, list(zip((i.name for i in infos), views(flat, infos, starts), strict=True))


# --- the receiver -----------------------------------------------------------------------------------------------------


def receive(connection: Connection, size: int, device: str) -> None:
    """The other process: does what it is told, and says how long that took."""
    import torch

    from relax_core.weight_receiver import Receiver

    torch.set_num_threads(1)
    receiver = Receiver(group=True, device=device)
    bare: Any = None
    while (message := connection.recv()) is not None:
        began = time.perf_counter()
        match message:
            case "update", update:
                receiver.receive(update)
            case "hold", bare:
                pin(bare, device)
            case "copy", _:
                receiver.memory(size).copy_(bare)
            case "join", (port, backend):
                bare = bare_group(1, port, backend, receiver.memory(size))
            case "broadcast", _:
                bare.broadcast(receiver.memory(size), 0).wait()
            case "free", _:
                unpin(bare, device)
                bare = None
                receiver.close()
        wait_for(device)
        connection.send(time.perf_counter() - began)


def bare_group(rank: int, port: int, backend: str, probe: Tensor) -> Any:
    """A process group of two, after its first broadcast."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroupGloo

    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if backend == "gloo":
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(store, rank, 2, options)
    else:
        from torch.distributed import ProcessGroupNCCL

        group = ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options())
    group.broadcast(probe[:1024], 0).wait()
    return group


def wait_for(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def pin(shared: Tensor, device: str) -> None:
    if device != "cpu":
        from relax_core.page_lock import page_lock

        page_lock(shared)


def unpin(shared: Any, device: str) -> None:
    from relax_core.page_lock import page_free

    if device != "cpu" and shared is not None and hasattr(shared, "is_pinned"):
        page_free(shared)


# --- the publisher ----------------------------------------------------------------------------------------------------


class Bench:
    """The publishing process with its weights, and the receiving one."""

    def __init__(self, megabytes: int, a: argparse.Namespace) -> None:
        import torch

        self.device = a.device
        self.flat, self.named = weights_of(megabytes, "cpu" if a.device == "cpu" else "cuda:0")
        self.backend = "gloo" if a.device == "cpu" else "nccl"
        self.other = "cpu" if a.device == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=receive, args=(there, self.flat.numel(), self.other), daemon=True)
        self.process.start()
        there.close()
        self.number = 0
        self.shared: object = None

    def tell(self, what: str, value: object = None) -> None:
        self.connection.send((what, value))

    def answer(self) -> float:
        if not self.connection.poll(PATIENCE_S):
            raise SystemExit("the receiving process does not answer")
        return float(self.connection.recv())

    def ask(self, what: str, value: object = None) -> float:
        self.tell(what, value)
        return self.answer()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(PATIENCE_S)
        self.connection.close()

    # --- bare -------------------------------------------------------------------------------------------------------

    def copies(self) -> Callable[[], float]:
        """A copy into a shared tensor here, and out of it there."""
        import torch

        shared: Any = torch.empty(self.flat.numel(), dtype=torch.uint8)
        shared.share_memory_()
        pin(shared, self.device)
        self.ask("hold", shared)
        self.shared = shared

        def once() -> float:
            began = time.perf_counter()
            shared.copy_(self.flat)
            wait_for(self.device)
            self.ask("copy")
            return time.perf_counter() - began

        return once

    def own_copies(self, here: Receiver) -> Callable[[], float]:
        """Both copies in this process, for the transport that stays in it."""
        middle = self.flat.clone()

        def once() -> float:
            began = time.perf_counter()
            middle.copy_(self.flat)
            here.memory(self.flat.numel()).copy_(middle)
            wait_for(self.device)
            return time.perf_counter() - began

        return once

    def broadcast(self) -> Callable[[], float]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.tell("join", (port, self.backend))
        group = bare_group(0, port, self.backend, self.flat)
        self.answer()

        def once() -> float:
            self.tell("broadcast")
            began = time.perf_counter()
            group.broadcast(self.flat, 0).wait()
            wait_for(self.device)
            self.answer()
            return time.perf_counter() - began

        return once

    # --- transports ---------------------------------------------------------------------------------------------------

    def turn(self, way: str, sums: bool, repeats: int) -> list[dict[str, float]]:
        """Seconds of ``publish``, of the whole, and of the bare thing, which take turns."""
        from relax_core import transports
        from relax_core.types import Version
        from relax_core.weight_receiver import Receiver

        kind = getattr(transports, f"{way.title()}Transport")
        transport: Transport = kind(kind.Config(checksums=sums))
        here = Receiver(device=str(self.flat.device)) if way == "copy" else None
        bare = self.own_copies(here) if here is not None else self.copies() if way == "shared" else self.broadcast()
        found = []
        for _ in range(3 + repeats):
            self.number += 1
            beside = bare()
            began = time.perf_counter()
            update = transport.publish(Version(0, self.number), self.named)
            published = time.perf_counter() - began
            if here is not None:
                here.receive(update)
                wait_for(self.device)
            else:
                self.ask("update", update)
            whole = time.perf_counter() - began
            counted = whole - published if way == "broadcast" else whole
            found.append({"publish": published, "whole": whole, "counted": counted, "bare": beside})
        pulled: int = getattr(transport, "pulled", 0)
        if pulled > self.flat.numel():
            raise SystemExit("the broadcast was given up for pulls over TCP: the machine is too busy to measure it")
        del update
        self.ask("free")
        unpin(self.shared, self.device)
        self.shared = None
        transport.close()
        return found[3:]

    def turns(self, a: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for number in range(a.rounds):
            for way in a.ways[:: -1 if number % 2 else 1]:
                for sums in (True, False):
                    for run in self.turn(way, sums, a.repeats):
                        ratios = {"ratio": run["bare"] / run["counted"], "ratio_whole": run["bare"] / run["whole"]}
                        about = {"way": way, "checksums": sums, "round": number, "bytes": self.flat.numel()}
                        yield about | run | ratios | {"load": os.getloadavg()[0]}


# --- the report -------------------------------------------------------------------------------------------------------


def judged(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each size, transport and setting of checksums, and whether its bar is reached."""
    result = []
    for size, way, sums in dict.fromkeys((t["megabytes"], t["way"], t["checksums"]) for t in turns):
        some = [t for t in turns if (t["megabytes"], t["way"], t["checksums"]) == (size, way, sums)]
        names = ("publish", "whole", "counted", "bare", "ratio", "ratio_whole")
        medians = {name: statistics.median(t[name] for t in some) for name in names}
        bar = BARS.get(way) if sums else None
        speed = {"gb_per_s": some[0]["bytes"] / medians["counted"] / 1e9, "ratios": [t["ratio"] for t in some]}
        verdict = {"bar": bar, "reached": None if bar is None else medians["ratio"] >= bar}
        result.append({"megabytes": size, "way": way, "checksums": sums} | medians | speed | verdict)
    return result


def table(bars: Sequence[Mapping[str, Any]], title: str) -> Table:
    result = Table(title=title, caption="ratio: bare seconds / seconds, median of the pairs (least to most)")
    headings = ("MB", "transport", "sums", "publish s", "whole s", "GB/s", "bare s", "ratio", "whole", "bar")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for bar in bars:
        verdict = "" if bar["bar"] is None else f"{bar['bar']:g} {'reached' if bar['reached'] else 'missed'}"
        ratio = f"{bar['ratio']:.2f} ({min(bar['ratios']):.2f}-{max(bar['ratios']):.2f})"
        seconds = [f"{bar[name]:.3f}" for name in ("publish", "whole")]
        speed = [f"{bar['gb_per_s']:.2f}", f"{bar['bare']:.3f}"]
        sums = "on" if bar["checksums"] else "off"
        whole = f"{bar['ratio_whole']:.2f}"
        result.add_row(str(bar["megabytes"]), bar["way"], sums, *seconds, *speed, ratio, whole, verdict)
    return result


def main() -> None:
    a = arguments()
    sys.path.insert(0, str(HERE.parent))
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    import torch

    from benchmarks.embedded import machine

    torch.set_num_threads(1)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    started, turns = time.strftime("%Y-%m-%dT%H:%M:%S%z"), []
    for size in a.sizes:
        bench = Bench(size, a)
        for turn in bench.turns(a):
            turns.append(turn | {"megabytes": size})
            sums = "sums" if turn["checksums"] else "none"
            line = f"{turn['way']:9} {sums}  bare {turn['bare']:.3f} s  {turn['counted']:.3f} s  {turn['ratio']:.2f}"
            console.print(f"{size} MB  round {turn['round'] + 1}/{a.rounds}  {line}", highlight=False)
        bench.close()
    bars = judged(turns)
    if a.json:
        settings = {name: value for name, value in vars(a).items() if name != "json"}
        report = {"started": started, "machine": machine(), "settings": settings, "bars": bars, "runs": turns}
        a.json.write_text(json.dumps(report, indent=1))
    console.print(table(bars, f"Weights from one process to another, {a.device}"))


if __name__ == "__main__":
    main()
