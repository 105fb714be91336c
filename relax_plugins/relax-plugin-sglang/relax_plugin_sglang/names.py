"""Weights under the names of the server's checkpoint, which its loader knows and fuses by itself.

A model here may hold what a checkpoint has in parts: all experts of a layer in one tensor. The server ignores a name
that it does not know, or with a warning only, so every name is compared with the folder from which it was started.

Legend: E experts, I their inner size, H hidden size.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.errors import WeightsError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Named = Sequence[tuple[str, "Tensor"]]
HEAD = "lm_head.weight"
_SHOWN = 5
_UNUSED = ("talker.", "code2wav.")
"""Parts of a Qwen3-Omni's checkpoint that the server does not load."""
_MOVED = {"model.language_model.": "model.", "model.visual.": "visual.", "model.audio_tower.": "audio_tower."}
"""Where a model here has its parts, and where an older checkpoint of it has them."""
_PARTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""Of tensors that hold all experts of a layer, (E, 2 I, H) and (E, H, I): the names of one expert's in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The names and shapes of a model folder, which the server has read too. ``tied``: its head is its embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool

    @classmethod
    def of(cls, folder: Path) -> Checkpoint:
        """Raises WeightsError for a folder without safetensors."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"weights: {folder} has no *.safetensors, so the names of its tensors are not known")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
        shapes = {name: shape for file in files for name, shape in _header(file) if not name.startswith(_UNUSED)}
        return cls(shapes, bool(tied))

    def named(self, weights: Named) -> list[tuple[str, Tensor]]:
        """Views of the same memory under the checkpoint's names, without the head of a tied model.

        Raises WeightsError, with the names, for tensors that the checkpoint does not have, or not with this shape.
        """
        weights = [(name, tensor) for name, tensor in weights if not (self.tied and name.endswith(HEAD))]
        if not any(part in known for known in self.shapes for part in _MOVED):
            weights = [(_older(name), tensor) for name, tensor in weights]
        prefix = self._prefix(weights)
        parts = [part for name, tensor in weights for part in self._parts(prefix + name, tensor)]
        unknown = [name for name, _ in parts if name not in self.shapes]
        if unknown:
            raise WeightsError(
                f"weights: the server's model has no {', '.join(unknown[:_SHOWN])}"
                f"{f' and {len(unknown) - _SHOWN} more' if len(unknown) > _SHOWN else ''}"
                f"{nearest(unknown[0], self.shapes)}; start it with the folder of this very model"
            )
        for name, tensor in parts:
            if tuple(tensor.shape) != self.shapes[name]:
                raise WeightsError(
                    f"weights {name}: shape {tuple(tensor.shape)}, the server's model has {self.shapes[name]}"
                )
        return parts

    def _prefix(self, weights: Named) -> str:
        """What the checkpoint's names begin with where the model here is a part of the server's, such as a thinker."""
        for name, _ in weights:
            if name in self.shapes:
                return ""
        found = {known.removesuffix(name) for name, _ in weights for known in self.shapes if known.endswith(f".{name}")}
        return found.pop() if len(found) == 1 else ""

    def _parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for whole, parts in _PARTS.items():
            if name not in self.shapes and name.endswith(whole) and tensor.ndim == 3:
                layer = name.removesuffix(whole)
                for i, expert in enumerate(tensor.unbind()):
                    for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                        yield f"{layer}experts.{i}.{part}.weight", piece
                return
        yield name, tensor


def _older(name: str) -> str:
    for new, old in _MOVED.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes; the tensors are not read."""
    with file.open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        header = json.loads(data.read(size))
    for name, about in header.items():
        if name != "__metadata__":
            yield name, tuple(about["shape"])
