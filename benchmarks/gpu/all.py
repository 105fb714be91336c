"""All measurements of this folder for a machine with one GPU, or with two, each with a time limit of its own.

    python -m benchmarks.gpu.all --gpus 1 --out DIR [--limit 570] [--cache kernels.tar.gz]

A part that fails or takes too long does not lose the others. DIR gets ``results.tar.gz`` (tables, errors, every
measurement, the servers' logs) and ``kernels.tar.gz``: what SGLang compiled, for ``--cache`` of the next machine, which
then starts a server in half a minute instead of two. The tables come last on the screen.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Part = tuple[str, float, str]
"""Name, most seconds, program with its arguments."""
WAVES: dict[int, list[list[list[Part]]]] = {
    1: [
        [
            [
                ("rollout", 240, "rollout --rounds 3"),
                ("handover", 200, "handover --rounds 2"),
                ("colocate", 200, "train --placement colocate --steps 5"),
                ("colocate-torch", 150, "train --placement colocate --engine torch --steps 3 --warmup 1"),
                ("weights-one", 150, "weights --gpus 1"),
                ("handover-1.7b", 150, "handover --shape qwen3-1.7b --rounds 2"),
                ("colocate-1.7b", 200, "train --placement colocate --shape qwen3-1.7b --steps 4 --warmup 1"),
            ]
        ]
    ],
    2: [
        [
            [("rollout", 220, "rollout --rounds 3"), ("weights-one", 100, "weights --gpus 1 --shapes qwen3-0.6b")],
            [("handover", 200, "handover --rounds 2"), ("colocate", 200, "train --placement colocate --steps 5")],
        ],
        [[("weights", 170, "weights --repeats 6")]],
        [[("separate", 200, "train --placement separate --steps 10")]],
        [[("separate-torch", 180, "train --placement separate --engine torch --steps 4 --warmup 1")]],
        [[("separate-1.7b", 200, "train --placement separate --shape qwen3-1.7b --steps 6")]],
    ],
}
"""Waves of lanes of parts: waves and the parts of a lane follow each other, lanes are at work at the same time, each on
a GPU of its own."""
CACHES = ("tvm", "triton")
LEAST_S = 30.0
"""With less left nothing is begun."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, choices=WAVES, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--parts", nargs="+", help="only these")
    p.add_argument("--limit", type=float, default=570.0, help="seconds for all of it")
    p.add_argument("--cache", type=Path, help="kernels.tar.gz of an earlier machine")
    p.add_argument("--folder", type=Path, default=Path("/tmp/relax-gpu"))
    p.add_argument("--more", default="", help="further arguments of every program")
    return p.parse_args(words)


def run(a: argparse.Namespace, part: Part, gpu: int | None, end: float) -> str:
    """Run a part; how it ended. ``gpu``: the only one that it sees."""
    name, seconds, command = part
    if a.parts and name not in a.parts:
        return ""
    left = end - time.monotonic()
    if left < LEAST_S:
        return f"{name}: not begun"
    words = [sys.executable, "-m", f"benchmarks.gpu.{command.split()[0]}", *command.split()[1:], *a.more.split()]
    words += ["--folder", str(a.folder / f"gpu{gpu or 0}"), "--json", str(a.folder / "out" / f"{name}.json")]
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
    began = time.monotonic()
    with (a.folder / "out" / f"{name}.txt").open("wb") as out, (a.folder / "out" / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(
            words, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            code = str(process.wait(min(seconds, left)))
        except subprocess.TimeoutExpired:
            code = f"stopped after {min(seconds, left):.0f} s"
        finally:
            _end(process)
    said = f"{name}: {'done' if code == '0' else code} in {time.monotonic() - began:.0f} s"
    print(said, flush=True)
    return said


def lane(a: argparse.Namespace, parts: Sequence[Part], gpu: int | None, end: float) -> list[str]:
    return [run(a, part, gpu, end) for part in parts]


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started; servers notice the end of their parent, and need a moment."""
    for number in (15, 9):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(3.0)


def environment(folder: Path) -> None:
    os.environ |= {"TVM_FFI_CACHE_DIR": str(folder / "kernels/tvm"), "TRITON_CACHE_DIR": str(folder / "kernels/triton")}
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def pack(a: argparse.Namespace) -> None:
    a.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(a.out / "results.tar.gz", "w:gz") as tar:
        tar.add(a.folder / "out", "out")
        for pattern in ("gpu*/runs/*/logs/*", "gpu*/runs/*/*.json*", "gpu*/*.yaml"):
            for file in a.folder.glob(pattern):
                if file.stat().st_size < 4 << 20:
                    tar.add(file, str(file.relative_to(a.folder)))
    with tarfile.open(a.out / "kernels.tar.gz", "w:gz") as tar:
        for name in CACHES:
            if (a.folder / "kernels" / name).is_dir():
                tar.add(a.folder / "kernels" / name, name)
    if (a.out / "kernels.tar.gz").stat().st_size > 15 << 20:
        (a.out / "kernels.tar.gz").unlink()


def tail(file: Path, characters: int) -> str:
    return file.read_text(errors="replace").strip()[-characters:] if file.is_file() else ""


def main(a: argparse.Namespace) -> None:
    end = time.monotonic() + a.limit
    environment(a.folder)
    (a.folder / "out").mkdir(parents=True, exist_ok=True)
    if a.cache and a.cache.is_file():
        with tarfile.open(a.cache) as tar:
            tar.extractall(a.folder / "kernels", filter="data")
    how: list[str] = []
    for wave in WAVES[a.gpus]:
        with ThreadPoolExecutor() as pool:
            lanes = [pool.submit(lane, a, parts, i if len(wave) > 1 else None, end) for i, parts in enumerate(wave)]
            how += [said for one in lanes for said in one.result() if said]
        pack(a)
    for ended in how:
        name = ended.partition(":")[0]
        print(f"\n=== {ended}")
        if ": done" not in ended:
            print(tail(a.folder / "out" / f"{name}.err", 1200))
        print(tail(a.folder / "out" / f"{name}.txt", 1700))


if __name__ == "__main__":
    main(arguments())
