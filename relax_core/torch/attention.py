"""Attention over a flat sequence of prompts and windows (see layout.py), as an attention function of transformers.

Token-wise layers run on the flat sequence (1, N) as it is. Here its tokens are arranged in rectangles: prompts attend to
themselves, and windows, several in a lane, to their prompt's keys and values and to their own tokens before. A prompt is
computed once, whatever the number of its windows; its gradient is the sum over them.

Legend: N tokens, P prompts, W prompt width, L lanes, S lane width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
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
                module.config = copy.deepcopy(module.config, copies)
        config: Any = model.config
        self._config = config.get_text_config(decoder=True)
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


class DeviceLanes:
    """The lanes of a layout on the model's device, with the attention masks that its layers ask for."""

    def __init__(self, lanes: Lanes, device: torch.device) -> None:
        def on_device(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        self.prompts_PW, self.lanes_LS = on_device(lanes.prompts_PW), on_device(lanes.lanes_LS)
        self.prompt_L, self._member_LS = on_device(lanes.prompt_L), on_device(lanes.member_LS)
        self._place_N = on_device(lanes.place_N)
        self._longest = int(lanes.place_N.max()) + 1
        self._masks: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor]] = {}
        # Reading an index of -1 gives the last token: finite, and never seen.
        slots = torch.cat([self.prompts_PW.flatten(), self.lanes_LS.flatten()])
        real = (slots >= 0).nonzero()[:, 0]
        self.slot_N = torch.empty_like(self._place_N).index_copy_(0, slots[real], real)
        """Where each token is among the rectangles' entries, prompts first."""
        self.slots = slots.clamp(min=0)

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """Additive masks for the prompts (None: causal) and the lanes. ``window``: how many tokens a layer sees."""
        if window is not None and window >= self._longest:
            window = None
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = self._made(window, dtype)
        return self._masks[window, dtype]

    def _made(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        lane_real_LS, prompt_real_PW = self.lanes_LS >= 0, self.prompts_PW >= 0
        order_S = torch.arange(self.lanes_LS.shape[1], device=self.lanes_LS.device)
        own_LSS = (self._member_LS[:, :, None] == self._member_LS[:, None]) & (order_S[:, None] >= order_S)
        own_LSS &= lane_real_LS[:, None] | torch.eye(len(order_S), dtype=torch.bool, device=order_S.device)
        place_LS, place_PW = self._place_N[self.lanes_LS], self._place_N[self.prompts_PW]
        seen = [own_LSS]
        if len(prompt_real_PW):
            width = prompt_real_PW.shape[1]
            prompt_LW = prompt_real_PW[self.prompt_L]
            seen = [prompt_LW[:, None].expand(-1, len(order_S), width), own_LSS]
        prompt_mask = None
        if window is not None:
            seen[-1] = own_LSS & (place_LS[:, :, None] - place_LS[:, None] < window)
            if len(prompt_real_PW):
                seen[0] = seen[0] & (place_LS[:, :, None] - place_PW[self.prompt_L][:, None] < window)
                order_W = torch.arange(width, device=order_S.device)
                near_WW = (order_W[:, None] >= order_W) & (order_W[:, None] - order_W < window)
                prompt_mask = _additive(near_WW, dtype)[None, None]
        return prompt_mask, _additive(torch.cat(seen, -1), dtype)[:, None]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


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
    (queries_P, queries_L), (keys_P, keys_L), (values_P, values_L) = (_arranged(x, lanes) for x in (query, key, value))
    outputs = []
    if len(lanes.prompts_PW):
        mixed_P = _sdpa(queries_P, keys_P, values_P, prompt_mask, scaling)
        keys_L = torch.cat([keys_P.index_select(0, lanes.prompt_L), keys_L], 2)
        values_L = torch.cat([values_P.index_select(0, lanes.prompt_L), values_L], 2)
        outputs.append(mixed_P.transpose(1, 2).flatten(0, 1))
    if len(lanes.lanes_LS):
        mixed_L = _sdpa(queries_L, keys_L, values_L, lane_mask, scaling)
        outputs.append(mixed_L.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, lanes.slot_N)[None], None


def _arranged(flat: Tensor, lanes: DeviceLanes) -> tuple[Tensor, Tensor]:
    """(1, X, N, D) -> (P, X, W, D) of the prompts and (L, X, S, D) of the lanes."""
    entries = flat[0].transpose(0, 1).index_select(0, lanes.slots)
    prompts, windows = entries.split([lanes.prompts_PW.numel(), lanes.lanes_LS.numel()])
    shape = entries.shape[1:]
    return (
        prompts.view(*lanes.prompts_PW.shape, *shape).transpose(1, 2),
        windows.view(*lanes.lanes_LS.shape, *shape).transpose(1, 2),
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    if query.device.type != "cpu" and mask is not None:  # a GPU's fused kernels take no mask with shared heads
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )


def _refuse(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ConfigError(
                f"trainer.layout: {type(module).__name__} attends with {name!r}, which the layouts shared and packed do not "
                "compute; set trainer.layout to 'padded'"
            )


AttentionInterface.register(NAME, attend)
