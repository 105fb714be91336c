"""Model folders: config and weights of a thinker, or of a whole Qwen3-Omni's, and the settings of processing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.errors import ConfigError
from relax_plugin_omni.config import OmniConfig
from relax_plugin_omni.processing import Settings
from relax_plugin_omni.tiny import PIXELS

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeThinkerConfig

_IMAGE_PIXELS, _VIDEO_PIXELS = (56 * 56, 3584 * 3584), (128 * 32 * 32, 768 * 32 * 32)
"""Budgets where a checkpoint states none: those of the model's own processor."""


def thinker_config(folder: Path) -> Qwen3OmniMoeThinkerConfig:
    """Raises ConfigError for another kind of model."""
    from transformers import AutoConfig, Qwen3OmniMoeConfig, Qwen3OmniMoeThinkerConfig  # with torch

    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    thinker = found.thinker_config if isinstance(found, Qwen3OmniMoeConfig) else found
    if not isinstance(thinker, Qwen3OmniMoeThinkerConfig):
        raise ConfigError(
            f"model.path: {folder} holds a {found.model_type}; model.id qwen3-omni takes qwen3_omni_moe or "
            "qwen3_omni_moe_thinker (text models: model.id text)"
        )
    return thinker


def settings(config: OmniConfig, thinker: Mapping[str, Any]) -> Settings:
    """From the run file, else the checkpoint's processor files, else the model's own defaults. Raises ConfigError.

    ``thinker``: the content of its config.
    """
    image = _processor_file(config.path, "image_processor", "preprocessor_config.json")
    video = _processor_file(config.path, "video_processor", "video_preprocessor_config.json")
    audio = _processor_file(config.path, "feature_extractor", "preprocessor_config.json")
    seeing, hearing = thinker["vision_config"], thinker["audio_config"]
    if hearing["n_window"] != 50:
        raise ConfigError(
            f"model.path: audio_config.n_window is {hearing['n_window']}; transformers counts audio tokens for 50 only"
        )
    tiny = config.tiny is not None
    found = Settings(
        patch=seeing["patch_size"],
        merge=seeing["spatial_merge_size"],
        temporal=seeing["temporal_patch_size"],
        mean=tuple(image.get("image_mean", [0.5] * 3)),
        std=tuple(image.get("image_std", [0.5] * 3)),
        image_pixels=config.image_pixels or (PIXELS if tiny else _pixels(image, _IMAGE_PIXELS)),
        video_pixels=config.video_pixels or (PIXELS if tiny else _pixels(video, _VIDEO_PIXELS)),
        image_tokens=config.image_tokens,
        video_tokens=config.video_tokens,
        mel_bins=hearing["num_mel_bins"],
        rate=audio.get("sampling_rate", 16000),
        hop=audio.get("hop_length", 160),
        fft=audio.get("n_fft", 400),
        window=hearing["n_window"],
        positions_per_second=thinker["position_id_per_seconds"],
    )
    _check_budgets(config, found)
    return found


def _check_budgets(config: OmniConfig, found: Settings) -> None:
    """Raises ConfigError for budgets that no medium, or none of the given least size, can keep."""
    token = found.factor**2
    for name, pixels in (("image_pixels", config.image_pixels), ("video_pixels", config.video_pixels)):
        if pixels and pixels[1] < token:
            raise ConfigError(
                f"model.{name}: found {list(pixels)}; one token is {found.factor} x {found.factor} pixels: the most "
                f"must be {token} or more"
            )
    budgets = (
        ("image", found.image_tokens, config.image_pixels),  # the least size of a checkpoint gives way
        ("video", found.video_tokens, found.video_pixels),
    )
    for kind, tokens, bounds in budgets:
        if tokens and bounds and bounds[0] > tokens * token:
            raise ConfigError(
                f"model.{kind}_tokens: found {tokens}, which is {tokens * token} pixels; model.{kind}_pixels asks for "
                f"{bounds[0]} or more{' in each frame' if kind == 'video' else ''}: raise the one, or lower the other"
            )


def save_settings(settings: Settings, folder: Path) -> None:
    """Write them where ``settings`` and transformers' own processors look."""
    vision = {
        "patch_size": settings.patch,
        "merge_size": settings.merge,
        "temporal_patch_size": settings.temporal,
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
    }
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": settings.mel_bins,
        "sampling_rate": settings.rate,
        "hop_length": settings.hop,
        "n_fft": settings.fft,
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3OmniMoeProcessor"}
    for name, kind, pixels in (
        ("preprocessor_config.json", image | audio, settings.image_pixels),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen2VLVideoProcessor"}, settings.video_pixels),
    ):
        content = vision | kind | {"min_pixels": pixels[0], "max_pixels": pixels[1]}
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _processor_file(folder: Path | None, section: str, name: str) -> dict[str, Any]:
    """The settings of one processor: its own file, or its section of the newer common one."""
    if folder is None:
        return {}
    for path in (folder / name, folder / "processor_config.json"):
        if path.is_file():
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if path.name == name or section in content:
                return content if path.name == name else content[section]
    return {}


def _pixels(content: dict[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    size = content.get("size") or {}
    least = content.get("min_pixels") or size.get("shortest_edge") or default[0]
    most = content.get("max_pixels") or size.get("longest_edge") or default[1]
    return int(least), int(most)
