"""A random thinker of the real transformers class, small enough to learn from scratch on a laptop's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_core.models.words import word_tokenizer
from relax_core.types import MediaKind
from relax_plugin_omni.config import TinyOmni

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARKERS: Mapping[MediaKind, str] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
"""What the chat template writes for a medium, before its placeholder is repeated."""

SPECIAL = (
    "<|im_start|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

PIXELS = (32 * 32, 64 * 64)
"""Least and most pixels of pictures, unless the config says otherwise: 1 to 4 tokens a picture."""


def tiny_tokenizer(tiny: TinyOmni) -> PreTrainedTokenizerFast:
    return word_tokenizer(tiny.words, MARKERS, SPECIAL)


def tiny_config(tiny: TinyOmni, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What ``Qwen3OmniMoeThinkerConfig`` takes, as in a ``config.json``.

    Deepstack, mixture of experts and three-axis positions are as in the released model, everything is small.
    """

    def token(name: str) -> int:
        found = tokenizer.convert_tokens_to_ids(name)
        assert isinstance(found, int)
        return found

    width, std = tiny.hidden, tiny.init_std
    return {
        "text_config": {
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "moe_intermediate_size": width,
            "num_hidden_layers": tiny.layers,
            "num_attention_heads": tiny.heads,
            "num_key_value_heads": tiny.kv_heads,
            "head_dim": width // tiny.heads,
            "num_experts": tiny.experts,
            "num_experts_per_tok": tiny.experts_per_token,
            "max_position_embeddings": 4096,
            "initializer_range": std,
            "rope_parameters": _rope(width // tiny.heads),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        "vision_config": _vision(tiny),
        "audio_config": _audio(tiny),
        "image_token_id": token("<|image_pad|>"),
        "audio_token_id": token("<|audio_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "audio_start_token_id": token("<|audio_start|>"),
        "vision_start_token_id": token("<|vision_start|>"),  # no field of the class; get_rope_index reads it
        "user_token_id": token("user"),
        "position_id_per_seconds": 13,  # as in the released checkpoints; the class's default is 25
        "initializer_range": std,
    }


def _vision(tiny: TinyOmni) -> dict[str, object]:
    return {
        "depth": 2,
        "hidden_size": tiny.hidden,
        "intermediate_size": 2 * tiny.hidden,
        "num_heads": tiny.heads,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": tiny.hidden,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
        "initializer_range": tiny.init_std,
    }


def _audio(tiny: TinyOmni) -> dict[str, object]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": tiny.heads,
        "encoder_ffn_dim": 2 * tiny.hidden,
        "d_model": tiny.hidden,
        "output_dim": tiny.hidden,
        "downsample_hidden_size": 16,
        "n_window": 50,
        "n_window_infer": 800,
        "initializer_range": tiny.init_std,
    }


def _rope(head: int) -> dict[str, object]:
    """Frequencies of a head shared out among the axes: time takes what height and width leave."""
    each = head // 2 // 3
    section = [head // 2 - 2 * each, each, each]
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section, "interleaved": True}
