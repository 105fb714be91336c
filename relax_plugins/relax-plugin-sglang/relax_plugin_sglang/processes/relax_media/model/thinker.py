"""Qwen3-Omni's thinker as SGLang computes it, after three repairs of it.

* A thinker that was saved by itself has names without ``thinker.``, and transformers' newer ones: both are loaded.
* Sounds of one batch are as long as they are; SGLang joins their spectrograms as if all were of one length.
* The decoder takes as many deepstack features as the vision tower gives; SGLang takes three.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models import qwen3_omni_moe as original

_MOVED = {"model.language_model.": "model.", "model.visual.": "visual.", "model.audio_tower.": "audio_tower."}
_OTHERS = ("talker.", "code2wav.")


class _Thinker(original.Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    def get_audio_feature(self, items: list[Any]) -> torch.Tensor:
        """What the audio tower makes of spectrograms (M, S) of any lengths, one after the other."""
        tower = self.audio_tower
        parameter = next(tower.parameters())
        joined = torch.cat([item.feature.to(parameter.device, parameter.dtype) for item in items], dim=-1)
        lengths = torch.tensor([item.feature.shape[-1] for item in items], device=parameter.device)
        heard: torch.Tensor = tower(joined, feature_lens=lengths).last_hidden_state
        return heard


class Qwen3OmniMoeForConditionalGeneration(original.Qwen3OmniMoeForConditionalGeneration):  # type: ignore[misc]
    """Of the same name as SGLang's own, whose place it takes."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        if not hasattr(config, "num_experts"):  # which SGLang's loading of weights reads here
            config.num_experts = config.thinker_config.text_config.num_experts
        super().__init__(config, quant_config, prefix)
        self.thinker.__class__ = _Thinker
        self.thinker.model.deepstack_embed_to_decoder_layer = range(self.thinker.num_deepstack_embeddings)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return super().load_weights((_of_the_whole(name), tensor) for name, tensor in weights)


def _of_the_whole(name: str) -> str:
    if name.startswith(_OTHERS):
        return name
    name = name.removeprefix("thinker.")
    for new, old in _MOVED.items():
        if name.startswith(new):
            name = old + name.removeprefix(new)
            break
    return f"thinker.{name}"


EntryClass = Qwen3OmniMoeForConditionalGeneration
