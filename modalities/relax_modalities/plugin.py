"""What the modalities suite provides. Text needs no decoder: it reaches the tokenizer as it is."""

from __future__ import annotations

from collections.abc import Mapping

from relax_core.interfaces import Component


def relax_modalities() -> Mapping[str, Component]:
    return {
        "image": Component("relax_modalities.image:Image", summary="still images (Pillow)"),
        "audio": Component("relax_modalities.audio:Audio", summary="sounds, mono 16 kHz (soundfile, PyAV)"),
        "video": Component("relax_modalities.video:Video", summary="frames at a target rate (PyAV, Pillow)"),
    }
