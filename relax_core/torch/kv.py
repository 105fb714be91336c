"""The key/value cache of the embedded engine: one slot for each running row, left-aligned, with a length of its own.

To the model it is a transformers ``Cache``. Where a forward's keys and values go is said before it, by ``to_prefill``
or ``to_decode``. Active rows lie in slots 0..N-1, so attention reads a view of them, never a copy.

Legend: S slots, C capacity, K key/value heads, D head size, P prompts, W their padded width, R new rows, N active rows,
L attended length.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaModel
from transformers.cache_utils import Cache, CacheLayerMixin

from relax_core.errors import EngineError

CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
"""What the installed transformers calls the cache in a model's forward."""

_ALIGNMENT = 16
"""Capacities and attended lengths are multiples of it: attention kernels are faster so, by up to a third on a CPU."""


def attention_windows(model: torch.nn.Module) -> Mapping[str, int | None]:
    """The model's kinds of attention layers, each with its sliding window (None: it sees everything).

    Raises EngineError for kinds whose state is no cache of keys and values.
    """
    config = text_config(model)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise EngineError(
                f"engine: the model has layers of type {kind!r}; the embedded engine caches full_attention and "
                "sliding_attention only: use another engine"
            )
    return {kind: known[kind] for kind in dict.fromkeys(kinds)}


def text_config(model: torch.nn.Module) -> Any:
    """The part of a transformers config that describes the language model; None for a model without config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class _RowMask:
    """The additive attention mask of each slot's next token, kept up to date by a few writes a step."""

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self.window = window
        self.bias_SC = torch.empty(0, 0, dtype=dtype, device=device)

    def grow(self, slots: int, capacity: int) -> None:
        old = self.bias_SC
        self.bias_SC = old.new_full((slots, capacity), -torch.inf)
        self.bias_SC[: old.shape[0], : old.shape[1]] = old

    def admit(self, first: int, lengths_R: Tensor) -> None:
        place_C = torch.arange(self.bias_SC.shape[1], device=self.bias_SC.device)
        seen_RC = place_C < lengths_R[:, None]
        if self.window is not None:
            seen_RC &= place_C >= lengths_R[:, None] - self.window
        rows = self.bias_SC[first : first + len(lengths_R)]
        rows.zero_().masked_fill_(~seen_RC, -torch.inf)

    def advance(self, rows_N: Tensor, lengths_N: Tensor) -> None:
        """Each row's new token sees itself, and no longer what leaves its window."""
        self.bias_SC[rows_N, lengths_N] = 0.0
        if self.window is not None:
            leaving_N = lengths_N - self.window
            inside_N = leaving_N >= 0
            self.bias_SC[rows_N[inside_N], leaving_N[inside_N]] = -torch.inf


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer's keys and values, (S, K, C, D) each; they appear with the first prefill."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak: a cycle would keep the keys and values of a cache that is no longer used until the collector runs.
        self.cache = cast("SlotCache", weakref.proxy(cache))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.cache.slots, key_states.shape[1], self.cache.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.cache.prefilling:
            self._fill(self.keys, key_states)
            self._fill(self.values, value_states)
            return key_states, value_states
        return self._extend(self.keys, key_states), self._extend(self.values, value_states)

    def _fill(self, held_SKCD: Tensor, new_PKWD: Tensor) -> None:
        """Copy each prompt into the slots of all rows that begin with it."""
        prompt_R = self.cache.prompt_R
        rows = held_SKCD[self.cache.first : self.cache.first + len(prompt_R)]
        rows[:, :, : new_PKWD.shape[2]] = new_PKWD.index_select(0, prompt_R)

    def _extend(self, held_SKCD: Tensor, new_NK1D: Tensor) -> Tensor:
        n, heads, _, size = new_NK1D.shape
        held_SKCD.view(-1, size).index_copy_(0, self.cache.places(heads), new_NK1D.reshape(n * heads, size))
        return held_SKCD[:n, :, : self.cache.attended]

    def grow(self) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_zeros(self.cache.slots, old.shape[1], self.cache.capacity, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(self, name, new)

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for held in (self.keys, self.values):
            if held is not None:
                held[targets, :, :length] = held[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # only asked in a prefill, which starts from nothing

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
    """Its name in older releases of transformers."""


class SlotCache(Cache):
    """Slots of all layers. It grows by doubling; rows and lengths never exceed ``max_slots`` and ``max_capacity``."""

    def __init__(
        self,
        windows: Mapping[str, int | None],
        dtype: torch.dtype,
        device: torch.device,
        max_slots: int,
        max_capacity: int | None,
    ) -> None:
        self.slot_layers: list[_SlotLayer] = []
        super().__init__(layers=cast(Any, self.slot_layers))
        self.device, self.max_slots, self.max_capacity = device, max_slots, max_capacity
        self.slots = self.capacity = 0
        self.prefilling = True
        self.first = self.attended = 0
        self.prompt_R = torch.empty(0, dtype=torch.long, device=device)
        self._masks = {kind: _RowMask(window, dtype, device) for kind, window in windows.items()}
        self._flat_N: Tensor = self.prompt_R
        self._places: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        held = [t for layer in self.slot_layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.nbytes for t in held)

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for so many rows, and rows of so many tokens."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if slots > self.slots:
            self.slots = max(slots, min(2 * self.slots, self.max_slots))
        if capacity > self.capacity:
            doubled = min(2 * self.capacity, self.max_capacity or 2 * self.capacity)
            self.capacity = _aligned(max(capacity, doubled))
        for mask in self._masks.values():
            mask.grow(self.slots, self.capacity)
        for layer in self.slot_layers:
            layer.grow()

    def to_prefill(self, first: int, prompt_R: Tensor, lengths_R: Tensor) -> None:
        """The next forward reads whole prompts; rows ``first``.. begin with the prompts ``prompt_R`` (indices of P)."""
        self.prefilling, self.first, self.prompt_R = True, first, prompt_R
        self._admit(first, lengths_R)

    def to_decode(self, lengths_N: Tensor, longest: int) -> Tensor | dict[str, Tensor]:
        """The next forward reads one token a row, placed after its ``lengths_N`` cached ones.

        Returns the additive attention mask, (N, 1, 1, L); by layer type where the model has several.
        """
        self.prefilling = False
        self.attended = _aligned(longest + 1)
        n = len(lengths_N)
        rows_N = torch.arange(n, device=self.device)
        self._rows_N, self._lengths_N = rows_N, lengths_N
        self._places = {}
        for mask in self._masks.values():
            mask.advance(rows_N, lengths_N)
        views = {kind: mask.bias_SC[:n, None, None, : self.attended] for kind, mask in self._masks.items()}
        return views if len(views) > 1 else next(iter(views.values()))

    def places(self, heads: int) -> Tensor:
        """Where the new keys go in a layer of so many heads, as rows of (S * K * C, D)."""
        if heads not in self._places:
            row_NK = self._rows_N[:, None] * heads + torch.arange(heads, device=self.device)
            self._places[heads] = (row_NK * self.capacity + self._lengths_N[:, None]).flatten()
        return self._places[heads]

    def share(self, first: int, sources_R: Tensor, lengths_R: Tensor, longest: int) -> None:
        """New rows ``first``.. begin with the first tokens of active rows."""
        targets = torch.arange(first, first + len(sources_R), device=self.device)
        self._copy(sources_R, targets, longest)
        self._admit(first, lengths_R)

    def move(self, sources: Tensor, targets: Tensor, longest: int) -> None:
        """Copy whole rows into the slots of rows that left."""
        self._copy(sources, targets, longest)
        for mask in self._masks.values():
            mask.bias_SC[targets] = mask.bias_SC[sources]

    def clear(self, slots: Tensor) -> None:
        """Forget what rows held that broke (NaN): stale values must stay finite, since masks multiply them by zero."""
        for layer in self.slot_layers:
            for held in (layer.keys, layer.values):
                if held is not None:
                    held[slots] = 0

    def _admit(self, first: int, lengths_R: Tensor) -> None:
        for mask in self._masks.values():
            mask.admit(first, lengths_R)

    def _copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        for layer in self.slot_layers:
            layer.copy(sources, targets, length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.slot_layers) <= layer_idx:
            self.slot_layers.append(_SlotLayer(self))
        return self.slot_layers[layer_idx].update(key_states, value_states)
