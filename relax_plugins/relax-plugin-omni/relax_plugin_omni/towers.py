"""Media into embeddings: the inputs of the thinker's towers, and their outputs in the placeholders' places.

Each medium of a batch runs through its tower once, however many rows hold it. transformers' own forward is not used for
this: it lets too few audio placeholders pass, keeps positions of the last call as state, and pads short clips to the
longest of the batch, which changes their features.

Shape legend: B rows, W width, H hidden size, N patches, K tokens of media in the batch, U tokens of unique media.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from relax_core.errors import DataError
from relax_core.types import MediaRef
from relax_plugin_omni.processing import Features, Plan, audio_chunks, audio_rows

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

PREFIX = "media_"
"""Inputs of the towers carry it, so that the rest can go to the decoder."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The thinker's towers and decoder; where they hang changed with transformers' versions."""

    visual: Any
    audio: Any
    decoder: Any

    @classmethod
    def of(cls, model: Qwen3OmniMoeThinkerForConditionalGeneration) -> Parts:
        inner: Any = model.model
        if hasattr(inner, "language_model"):
            return cls(inner.visual, inner.audio_tower, inner.language_model)
        outer: Any = model
        return cls(outer.visual, outer.audio_tower, inner)


def media_inputs(
    refs: Sequence[tuple[int, MediaRef]], features: Mapping[str, Features], plans: Mapping[str, Plan], window: int
) -> dict[str, Any]:
    """Tower inputs for placeholders that start at the given places of the flattened batch (row-major order)."""
    inputs: dict[str, Any] = {}
    towers: tuple[Literal["vision", "audio"], ...] = ("vision", "audio")
    for name in towers:
        places = {key: plan.places(name) for key, plan in plans.items()}
        found = [(at, ref.key) for at, ref in refs if len(places[ref.key])]
        if not found:
            continue
        keys = list(dict.fromkeys(key for _, key in found))
        ends = np.cumsum([len(places[k]) for k in keys])
        starts = {k: int(end) - len(places[k]) for k, end in zip(keys, ends, strict=True)}
        inputs[f"{name}_tokens"] = int(ends[-1])
        into = np.concatenate([at + places[key] for at, key in found])
        taken = np.concatenate([np.arange(starts[key], starts[key] + len(places[key])) for _, key in found])
        inputs[f"{name}_into"], inputs[f"{name}_from"] = torch.from_numpy(into), torch.from_numpy(taken)
        if name == "vision":
            inputs["pixels"] = torch.from_numpy(np.concatenate([features[k]["pixels"] for k in keys]))
            inputs["grid"] = torch.from_numpy(np.stack([features[k]["grid"] for k in keys]))
        else:
            mels = [features[k]["mel"] for k in keys]
            chunks, lengths = audio_chunks(mels, window)
            inputs["chunks"], inputs["chunk_lengths"] = torch.from_numpy(chunks), torch.from_numpy(lengths)
            inputs["chunk_rows"] = torch.from_numpy(audio_rows(lengths, chunks.shape[2]))
            inputs["frames"] = torch.tensor([mel.shape[1] for mel in mels])
    return {PREFIX + k: v for k, v in inputs.items()}


def embed(parts: Parts, ids_BW: torch.Tensor, media: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's ``inputs_embeds`` (B, W, H), and where there are pictures their deepstack features.

    Raises DataError when a tower gives another number of tokens than the batch has placeholders for.
    """
    embeds = parts.decoder.get_input_embeddings()(ids_BW)
    flat = embeds.reshape(-1, embeds.shape[-1])
    inputs = {k.removeprefix(PREFIX): v for k, v in media.items()}
    result: dict[str, Any] = {}
    if "chunks" in inputs:
        flat = _placed(flat, _hear(parts.audio, inputs), inputs, "audio")
    if "pixels" in inputs:
        seen = parts.visual(inputs["pixels"].to(parts.visual.dtype), grid_thw=inputs["grid"], return_dict=True)
        flat = _placed(flat, seen.pooler_output, inputs, "vision")
        places = torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
        result["visual_pos_masks"] = places.index_fill(0, inputs["vision_into"], True).view_as(ids_BW)
        result["deepstack_visual_embeds"] = [layer[inputs["vision_from"]] for layer in seen.deepstack_features]
    return {"inputs_embeds": flat.view_as(embeds), **result}


def _hear(tower: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Features (U, H) of the batch's clips, one after the other."""
    heard = tower(
        feature_lens=inputs["frames"],
        padded_feature=inputs["chunks"],
        chunk_lengths=inputs["chunk_lengths"],
        valid_indices=inputs["chunk_rows"],
        return_dict=True,
    )
    features: torch.Tensor = heard.last_hidden_state
    return features


def _placed(flat: torch.Tensor, features_UH: torch.Tensor, inputs: Mapping[str, Any], name: str) -> torch.Tensor:
    """The embeddings with the placeholders' rows replaced."""
    planned = inputs[f"{name}_tokens"]
    if features_UH.shape[0] != planned:
        raise DataError(
            f"the {name} tower gives {features_UH.shape[0]} tokens for media with {planned} placeholders; the model's "
            "config does not fit its processing"
        )
    return flat.index_copy(0, inputs[f"{name}_into"], features_UH[inputs[f"{name}_from"]].to(flat.dtype))
