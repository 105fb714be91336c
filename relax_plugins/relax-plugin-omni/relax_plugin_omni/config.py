"""Settings of the Qwen3-Omni adapter, apart from its code so that reading a run file imports no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from relax_core.models.config import ModelConfig, TinyModel

Pixels = tuple[PositiveInt, PositiveInt]


class TinyOmni(TinyModel):
    """A random thinker of the real architecture: 0.56 million parameters with the defaults."""

    experts: PositiveInt = 4
    experts_per_token: PositiveInt = 2

    @model_validator(mode="after")
    def _experts(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token: found {self.experts_per_token}; allowed: 1 to experts ({self.experts})"
            )
        return self


class OmniConfig(ModelConfig):
    """Settings of ``qwen3-omni``. ``path`` may hold a thinker, or a whole Qwen3-Omni, whose thinker is used."""

    tiny: TinyOmni | None = None
    """A random thinker instead, for tests and demonstrations."""
    image_pixels: Pixels | None = None
    """Least and most pixels of a scaled image; default: what the checkpoint says, for a tiny model 1024 and 4096."""
    video_pixels: Pixels | None = None
    """The same for each frame of a video."""
    image_tokens: PositiveInt | None = None
    """Most tokens of an image: it is scaled to at most so many merged patches, whatever ``image_pixels`` allows."""
    video_tokens: PositiveInt | None = None
    """Most tokens of a whole video. With T time steps each frame is scaled to at most ``video_tokens / T`` merged
    patches, but not below the least of ``video_pixels``: a video that does not fit even so is an error of its row."""
    use_audio_in_video: bool | Literal["if_any"] = False
    """Whether the sound of a video file is read with it, interleaved by time. A silent video is an error of its row,
    or with ``if_any`` read without sound."""
    experts: Literal["grouped_mm", "batched_mm", "eager"] = "grouped_mm"
    """How transformers computes the mixture of experts; batched_mm is far slower in training on a CPU."""

    @model_validator(mode="after")
    def _budgets(self) -> Self:
        for name, pixels in (("image_pixels", self.image_pixels), ("video_pixels", self.video_pixels)):
            if pixels and pixels[0] > pixels[1]:
                raise ValueError(f"{name}: found {list(pixels)}; the least must not exceed the most")
        return self
