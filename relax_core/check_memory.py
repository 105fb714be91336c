"""What the copies of the policy take of a device's memory: an estimate from the number of its parameters."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from relax_core.interfaces import VALUES
from relax_core.old_policy import recomputes_old
from relax_core.runtime_config import Deployed, deployed_of

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.run import Run

Sizes = Mapping[str, int]
"""Numbers of a model's parameters, by name."""

NOT_INCLUDED = "not included: activations, the engine's cache, buffers of the collectives, and what CUDA itself takes"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process on its device, by what they are."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_words(size)}" for name, size in self.parts.items() if size)
        return f"{in_words(self.total)} ({parts})"


def in_words(size: float) -> str:
    """Bytes, as powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


@dataclass(frozen=True, slots=True)
class Keeper:
    """A process that keeps copies of the weights. ``who``: what it is called, without an article."""

    who: str
    memory: Memory
    on_gpu: bool


def memory_problems(run: Run, adapter: ModelAdapter, report: Callable[[str], None]) -> Iterator[str]:
    """Report what each process with a model keeps; a line where that alone is more than a device has."""
    sizes, deployed = sizes_of(adapter), deployed_of(run)
    if sizes is None:
        report("memory: not estimated: there are no safetensors files, whose headers would tell the model's size")
        return
    keepers, count = _keepers(run, sizes, deployed), sum(sizes.values())
    report(f"memory: {_short(count)} parameters; each engine keeps {keepers[0].memory}")
    for keeper in keepers[1:]:
        report(f"memory: each {keeper.who} keeps {keeper.memory}")
    trainer = run.stack.config("trainers", run.config.trainer, "trainer")
    published = count * width(trainer, deployed.trainer_gpus)
    report(f"memory: {in_words(published)} of main memory for each published version")
    report(f"memory: {NOT_INCLUDED}")
    room = gpu_bytes() if any(keeper.on_gpu for keeper in keepers) else None
    if room is None:
        return
    for who, size in _on_one_gpu(keepers, deployed.together):
        report(f"memory: {who}: {in_words(size)} of the {in_words(room)} of this machine's GPU")
        if size > room and deployed.here:
            yield (
                f"memory: {who} would keep {in_words(size)}, and a GPU of this machine has {in_words(room)}: take a "
                "smaller model, more ranks with trainer.sharding: fsdp, or devices of their own"
            )


def _keepers(run: Run, sizes: Sizes, deployed: Deployed) -> list[Keeper]:
    """An engine, a rank of the trainer, and where they have processes of their own those of critic and old policy."""
    stack, config = run.stack, run.config
    engine: Any = stack.config("engines", config.engine, "engine")
    trainer: Any = stack.config("trainers", config.trainer, "trainer")
    algorithm = stack.build("algorithms", config.algorithm, where="algorithm")
    critic, apart = bool(algorithm.outputs & VALUES), deployed.critic_ranks
    of_engine = engine_memory(sizes, width(engine, deployed.engine_gpus))
    bytes_each = width(trainer, deployed.trainer_gpus)
    of_rank = trainer_memory(sizes, trainer, bytes_each, deployed.ranks, critic and apart is None)
    found = [
        Keeper("engine", of_engine, on_device(engine, deployed.engine_gpus)),
        Keeper("rank of the trainer", of_rank, on_device(trainer, deployed.trainer_gpus)),
    ]
    if critic and apart is not None:
        of_critic = trainer_memory(sizes, trainer, width(trainer, deployed.critic_gpus), apart, False)
        found.append(Keeper("rank of the critic", of_critic, on_device(trainer, deployed.critic_gpus)))
    if deployed.old_policy_gpus is not None and recomputes_old(config, algorithm):
        of_old = engine_memory(sizes, width(_anywhere(trainer), deployed.old_policy_gpus))
        found.append(Keeper("process of the old policy", of_old, bool(deployed.old_policy_gpus)))
    return found


def _on_one_gpu(keepers: Sequence[Keeper], together: str) -> list[tuple[str, float]]:
    """What is on a GPU at the same time, and its bytes."""
    found = {
        keeper.who: (f"{'an' if keeper.who[0] in 'aeiou' else 'a'} {keeper.who}", keeper.memory.total)
        for keeper in keepers
        if keeper.on_gpu
    }
    trainer, critic = found.get("rank of the trainer"), found.get("rank of the critic")
    if together == "resident" and trainer and "engine" in found:
        return [("engine and trainer together", found["engine"][1] + trainer[1])]
    if together == "turns" and trainer and critic:  # they learn in the same turn
        del found["rank of the critic"]
        found["rank of the trainer"] = ("a rank of the trainer and one of the critic", trainer[1] + critic[1])
    return list(found.values())


# --- estimates --------------------------------------------------------------------------------------------------------


def engine_memory(sizes: Sizes, bytes_each: int) -> Memory:
    """Of an engine that keeps one copy of the weights."""
    return Memory({"weights": sum(sizes.values()) * bytes_each})


def trainer_memory(sizes: Sizes, config: Any, bytes_each: int, ranks: int, critic: bool) -> Memory:
    """Of one rank of the torch trainer: weights, float32 masters where weights are shorter, the gradient's sum and
    AdamW's two averages, each for what is not frozen; with a critic all of it twice.

    Divided over ranks with ``sharding: fsdp``; its weights are the float32 ones, and a layer at a time is gathered.
    """
    patterns: Sequence[str] = getattr(config, "frozen", ())
    total = sum(sizes.values())
    trained = sum(n for name, n in sizes.items() if not any(fnmatchcase(name, pattern) for pattern in patterns))
    divided = ranks if getattr(config, "sharding", "replicate") == "fsdp" else 1
    bytes_each = 4 if divided > 1 else bytes_each
    copies = (2 if critic else 1) / divided
    return Memory(
        {
            "weights": copies * total * bytes_each,
            "masters": copies * trained * 4 * (bytes_each < 4),
            "gradients": copies * trained * 4,
            "AdamW": copies * trained * 8,
        }
    )


def sizes_of(adapter: ModelAdapter) -> Sizes | None:
    """From the headers of the checkpoint's safetensors files, or from a tiny model itself; None: from neither.

    A checkpoint may hold parts that are not loaded, such as a talker; then the estimate is too high.
    """
    import torch

    folder = getattr(adapter.config, "path", None)
    if getattr(adapter.config, "tiny", None) is not None:
        model = adapter.load("cpu", torch.float32)
        return {name: parameter.numel() for name, parameter in model.named_parameters()}
    if folder is None:
        return None
    found: dict[str, int] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= header(file)
    return found or None


def header(file: Path) -> Sizes:
    """Numbers of elements by tensor of a safetensors file; its data are not read."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        tensors = json.loads(opened.read(length))
    return {name: prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__"}


def width(config: Any, gpus: float | None) -> int:
    """Bytes of a weight, by the settings of an engine or a trainer."""
    dtype = getattr(config, "dtype", "auto")
    if dtype == "auto":
        return 2 if on_device(config, gpus) else 4
    return 4 if dtype == "float32" else 2


def _anywhere(config: Any) -> Any:
    """The settings of who computes in a trainer's type, on whatever device it gets."""
    return SimpleNamespace(dtype=getattr(config, "dtype", "auto"))


def on_device(config: Any, gpus: float | None) -> bool:
    """Whether it computes on a GPU. ``gpus``: what the runtime gives it; None: whatever there is."""
    device = getattr(config, "device", "auto")
    if device == "auto":
        return gpu_bytes() is not None if gpus is None else gpus > 0
    return str(device).startswith("cuda")


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU that this process sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))


def _short(number: int) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)
