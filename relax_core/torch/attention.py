"""Attention over a flat sequence of prompts and windows (see layout.py), as an attention function of transformers.

Token-wise layers run on the flat sequence (1, N) as it is. Here its tokens are arranged in rectangles: prompts attend
to themselves, and windows, several in a lane, to their prompt's keys and values and to their own tokens before. A
prompt is computed once, whatever the number of its windows; its gradient is the sum over them.

Legend: N tokens, P prompts, W prompt width, L lanes, S lane width, H query heads, K key/value heads, X either kind of
heads, D head size; of a rectangle R rows, C columns, E = R x C entries, n tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from relax_core.errors import ConfigError
from relax_core.torch.layout import Lanes

NAME = "relax_lanes"
_ATTRIBUTE = "relax_lanes"
_REFUSED = ("softcap", "s_aux", "position_bias")
"""What an architecture may hand to its attention that is not computed here."""


class LaneAttention:
    """Lets a model attend in lanes while ``lanes`` are set; otherwise it attends as before.

    One instance a model. The model's config is replaced by a copy, which another copy of the model cannot share.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        copies: dict[int, Any] = {}
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = cast(Any, copy.deepcopy(module.config, copies))
        self._config = cast(Any, model).config.get_text_config(decoder=True)
        self._own = self._config._attn_implementation
        for module in model.modules():
            if getattr(module, "config", None) is self._config:
                setattr(module, _ATTRIBUTE, self)
        self.calls = 0
        """Attention layers that ran in lanes since they were set."""
        self._lanes: DeviceLanes | None = None

    @property
    def lanes(self) -> DeviceLanes | None:
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: DeviceLanes | None) -> None:
        self._lanes = lanes
        self.calls = 0
        self._config._attn_implementation = self._own if lanes is None else NAME


def supports_lanes(model: torch.nn.Module) -> bool:
    """Whether all layers of a transformers model attend to keys and values, so that rows can lie in one sequence."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return False
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return set(kinds) <= {"full_attention", "sliding_attention"}


class Rectangle:
    """Rows of a rectangle (R, C), whose tokens, without the padding at the rows' ends, lie one after the other."""

    def __init__(self, lengths_R: NDArray[np.int64], first: int, device: torch.device) -> None:
        width = int(lengths_R.max(initial=0))
        self.shape = (len(lengths_R), width)
        self.tokens = slice(first, first + int(lengths_R.sum()))
        real_RC = np.arange(width) < lengths_R[:, None]
        entry_N = np.flatnonzero(real_RC)
        token_E = np.zeros(real_RC.size, np.int64)  # padding reads the first token: finite, and never seen
        token_E[entry_N] = np.arange(len(entry_N))
        self.full = bool(real_RC.all())
        self.real_RC = torch.from_numpy(real_RC).to(device)
        self._entry_N, self._token_E = torch.from_numpy(entry_N).to(device), torch.from_numpy(token_E).to(device)
        self._padding = torch.from_numpy(np.flatnonzero(~real_RC)).to(device)

    def arranged(self, flat: Tensor) -> Tensor:
        """(R, X, C, D) of its tokens (n, X, D)."""
        entries = flat if self.full else _rearranged(flat, self._token_E, self._entry_N, None)
        return entries.view(*self.shape, *flat.shape[1:]).transpose(1, 2)

    def flat(self, arranged: Tensor) -> Tensor:
        """The tokens (n, X, D) of (R, X, C, D)."""
        entries = arranged.transpose(1, 2).flatten(0, 1)
        return entries if self.full else _rearranged(entries, self._entry_N, self._token_E, self._padding)

    def of(self, values_N: Tensor) -> Tensor:
        """Numbers of tokens (N) as (R, C)."""
        return values_N[self.tokens][self._token_E].view(self.shape)


class _Rearranged(torch.autograd.Function):
    """``x.index_select(0, there)``, where ``back`` leads back: its gradient needs no sums, so its bits never vary.

    Entries of x that ``there`` leaves out (``unread``) get the gradient 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, unread: Tensor | None) -> Tensor:
        ctx.back, ctx.unread = back, unread
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].index_select(0, ctx.back)
        if ctx.unread is not None:
            gradient.index_fill_(0, ctx.unread, 0)
        return gradient, None, None, None


def _rearranged(x: Tensor, there: Tensor, back: Tensor, unread: Tensor | None) -> Tensor:
    return cast(Tensor, _Rearranged.apply(x, there, back, unread))  # type: ignore[no-untyped-call]


class DeviceLanes:
    """The rectangles of a layout on the model's device, with the attention masks that its layers ask for."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        self.prompts = Rectangle(lanes.prompt_lengths_P, 0, device)
        self.lanes = Rectangle(lanes.lane_lengths_L, self.prompts.tokens.stop, device)
        self.sizes = [len(lanes.place_N[r.tokens]) for r in (self.prompts, self.lanes)]
        self.prompt_L = torch.from_numpy(lanes.prompt_L).to(device)
        self._window_N, self._place_N = (torch.from_numpy(x).to(device) for x in (lanes.window_N, lanes.place_N))
        self._longest = int(lanes.place_N.max()) + 1
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor]] = {}

    def masks(self, reach: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """Additive masks of prompts (None: causal) and lanes. ``reach``: how many tokens a layer sees; None: all."""
        if reach is not None and reach >= self._longest:
            reach = None
        if (reach, dtype) not in self._masks:
            prompts, lanes = self._prompt_mask(reach), self._lane_mask(reach)
            self._masks[reach, dtype] = (
                None if prompts is None else _additive(prompts, dtype),
                _additive(lanes, dtype),
            )
        return self._masks[reach, dtype]

    def _prompt_mask(self, reach: int | None) -> Tensor | None:
        if reach is None:
            return None
        order_W = torch.arange(self.prompts.shape[1], device=self.prompt_L.device)
        back_WW = order_W[:, None] - order_W
        return ((back_WW >= 0) & (back_WW < reach))[None]

    def _lane_mask(self, reach: int | None) -> Tensor:
        """(L, S, W + S) bool: what each token sees of its prompt, and of its lane."""
        real_LS, window_LS, place_LS = self.lanes.real_RC, self.lanes.of(self._window_N), self.lanes.of(self._place_N)
        order_S = torch.arange(real_LS.shape[1], device=real_LS.device)
        seen_LSS = (window_LS[:, :, None] == window_LS[:, None]) & (order_S[:, None] >= order_S)
        # Padding sees itself alone: to see nothing would make NaN.
        seen_LSS &= real_LS[:, None] | torch.eye(len(order_S), dtype=torch.bool, device=real_LS.device)
        if reach is not None:
            seen_LSS &= place_LS[:, :, None] - place_LS[:, None] < reach
        if not self.prompts.shape[0]:
            return seen_LSS
        seen_LSW = self.prompts.real_RC[self.prompt_L][:, None].expand(-1, len(order_S), -1)
        if reach is not None:
            place_LW = self.prompts.of(self._place_N)[self.prompt_L]
            seen_LSW = seen_LSW & (place_LS[:, :, None] - place_LW[:, None] < reach)
        return torch.cat([seen_LSW, seen_LSS], -1)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
    return mask[:, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    _refuse(module, others)
    attention: LaneAttention = getattr(module, _ATTRIBUTE)
    lanes = attention.lanes
    assert lanes is not None and attention_mask is None
    attention.calls += 1
    prompt_mask, lane_mask = lanes.masks(sliding_window, query.dtype)
    flat = [torch.split(x[0].transpose(0, 1), lanes.sizes) for x in (query, key, value)]
    queries_L, keys_L, values_L = (lanes.lanes.arranged(own) for _, own in flat)
    outputs = []
    if lanes.prompts.shape[0]:
        queries_P, keys_P, values_P = (lanes.prompts.arranged(own) for own, _ in flat)
        outputs.append(lanes.prompts.flat(_sdpa(queries_P, keys_P, values_P, prompt_mask, scaling)))
        keys_L = torch.cat([keys_P.index_select(0, lanes.prompt_L), keys_L], 2)
        values_L = torch.cat([values_P.index_select(0, lanes.prompt_L), values_L], 2)
    if lanes.lanes.shape[0]:
        outputs.append(lanes.lanes.flat(_sdpa(queries_L, keys_L, values_L, lane_mask, scaling)))
    return torch.cat(outputs)[None], None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    if query.device.type != "cpu" and mask is not None:  # a GPU's fused kernels take no mask with shared heads
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _refuse(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ConfigError(
                f"trainer.layout: {type(module).__name__} attends with {name!r}, which the layouts shared and packed "
                "do not compute; set trainer.layout to 'padded'"
            )


AttentionInterface.register(NAME, attend)
