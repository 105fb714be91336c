"""The thinker itself: random or from a checkpoint, with a faster patch embedding. Imports transformers' model code.

Shape legend: N patches, D values of a patch, H hidden size of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionPatchEmbed

from relax_core.models import hf
from relax_plugin_omni.checkpoint import thinker_config
from relax_plugin_omni.towers import Parts


class MatrixPatchEmbed(Qwen3OmniMoeVisionPatchEmbed):
    """The patch embedding as the one matrix product that it is: several times faster than its convolution.

    The kernel is as large as a patch, so both compute the same; names and shapes of the weights stay.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Patches (N, D) -> (N, H)."""
        weight = self.proj.weight
        return torch.nn.functional.linear(hidden_states.to(weight.dtype), weight.flatten(1), self.proj.bias)


def random_thinker(config: Mapping[str, Any]) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """Of a ``config.json``'s content; torch's generator draws the weights."""
    return _improved(Qwen3OmniMoeThinkerForConditionalGeneration(Qwen3OmniMoeThinkerConfig(**config)))


def load_thinker(folder: Path, dtype: torch.dtype) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    """The thinker's weights; those of the talker in a whole checkpoint are left out. Raises ConfigError."""
    model = hf.load_pretrained(
        Qwen3OmniMoeThinkerForConditionalGeneration,
        folder,
        dtype,
        config=thinker_config(folder),
    )
    assert isinstance(model, Qwen3OmniMoeThinkerForConditionalGeneration)
    return _improved(model)


def _improved(
    model: Qwen3OmniMoeThinkerForConditionalGeneration,
) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    Parts.of(model).visual.patch_embed.__class__ = MatrixPatchEmbed
    return model
