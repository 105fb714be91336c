"""What the omni plugin offers: the model adapter ``qwen3-omni``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.hookspecs import impl
from relax_core.interfaces import Component
from relax_plugin_omni.config import OmniConfig

relax_api = 1


@impl
def relax_models() -> Mapping[str, Component]:
    return {
        "qwen3-omni": Component(
            "relax_plugin_omni.adapter:OmniAdapter",
            config=OmniConfig,
            sample={"tiny": {"words": ["?"]}, "image_pixels": [56 * 56, 3584 * 3584], "video_pixels": [131072, 786432]},
            summary="The Qwen3-Omni thinker: reads text, images, audio and video, and writes text.",
        )
    }
