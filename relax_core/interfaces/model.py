"""Between messages and a model: tokens, media, positions, forward inputs. Shape legend: B rows, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.interfaces.component import Configurable
from relax_core.models.tool_calls import HermesParser, ToolCallParser
from relax_core.types import Encoded, MediaKind, MediaRef, Message

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from relax_core.media import MediaStore


@dataclass(frozen=True, slots=True)
class Segment:
    """A token sequence to run through the model: from position 0 of a row, with its media."""

    ids: Sequence[int]
    media: Sequence[MediaRef] = ()
    positions: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class TowerInput:
    """What one tower reads of one medium, and where in a row what it makes of it goes (K places, in order).

    ``features`` have the names of transformers' processors: ``pixel_values`` (N patches, D values) with
    ``image_grid_thw`` (3,), ``pixel_values_videos`` with ``video_grid_thw``, or ``input_features`` (M mel bins, S
    frames).
    ``key`` names their content.
    """

    kind: MediaKind
    key: str
    places_K: NDArray[np.int64]
    features: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Extended:
    """The past stands; ``new`` holds only the tokens between two samplings (media start at the row's start)."""

    new: Encoded


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The template changes what was already sampled: a new sample must start."""

    reason: str


class ModelAdapter(Configurable, ABC):
    """Between messages and a model. One instance a process; it holds the tokenizer, never the weights."""

    kinds: frozenset[MediaKind] = frozenset()
    """Media that the model reads."""
    shares_prefix: bool = True
    """Whether a prompt's cache may be shared by its group in training with the exact same gradient."""
    stop_ids: frozenset[int]
    banned_token_ids: tuple[int, ...]
    """Never sampled; masked in the engine and in the trainer alike."""
    pad_id: int
    vocab_size: int
    tool_calls: ToolCallParser = HermesParser()
    """Reads the tool calls of a reply's text, in the format that the model writes."""

    def __init__(self, config: Any, media: MediaStore, seed: int = 0) -> None:
        """``seed``: the run's, of random initial weights."""
        super().__init__(config)
        self.media, self.seed = media, seed

    @abstractmethod
    def encode(self, history: Sequence[Message]) -> Encoded:
        """The whole history with the assistant's header at the end, ready to sample from.

        Raises DataError for what cannot be read. Several threads may call it at once.
        """

    @abstractmethod
    def extend(self, history: Sequence[Message], past: Encoded, new: Sequence[Message]) -> Extended | Rewritten:
        """What comes between the last sampled token of ``past`` and the next sampling.

        ``history`` is what was said up to and including the last reply; ``past`` its tokens as sampled.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled tokens, without special tokens."""

    def reply(self, text: str) -> list[int]:
        """The ids of a reply of this text, its end of turn included: for replies that are written, not sampled.

        Raises DataError for text that the model has no tokens for. Only plays by hand or by a script need it.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be spoken for: it has no reply()")

    @abstractmethod
    def forward_inputs(self, segments: Sequence[Segment], width: int) -> dict[str, Any]:
        """Keyword arguments of ``backbone`` for right-padded rows (B, width): input_ids, position_ids, media features.

        The caller adds attention mask and cache.
        """

    def tower_inputs(self, row: Segment) -> Sequence[TowerInput]:
        """The media of a whole row as ``forward_inputs`` reads them, for engines that compute the model by themselves.

        Models that read media may leave it out; then only engines that call ``forward_inputs`` serve them.
        """
        raise NotImplementedError(f"{type(self).__name__} hands over no media: it has no tower_inputs")

    @abstractmethod
    def load(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """A fresh copy of the initial model; equal bits at every call."""

    @abstractmethod
    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        """Last hidden states (B, width, hidden), after the final norm."""

    @abstractmethod
    def head(self, model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of hidden states (..., hidden)."""

    @abstractmethod
    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """Write a Hugging Face folder."""
