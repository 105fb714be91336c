"""Tiny omni adapters and rows that mix all media, for tests of this plugin and of those built on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relax_core.media import MediaStore
from relax_core.testing.noise import film, picture, sound
from relax_core.types import Encoded, user
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.config import OmniConfig

WORDS = (
    *("what", "colour", "tone", "which", "way", "sum", "+", "=", "?", "red", "green", "blue", "yellow", "high", "low"),
    *("left", "right", "up", "down", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
)


def tiny_omni(words: Sequence[str] = WORDS, **settings: Any) -> OmniAdapter:
    """An adapter of the tiny random model, with a store of its own; ``settings`` are those of the run file."""
    config = {"tiny": {"words": list(words)}, **settings}
    return OmniAdapter(OmniConfig.model_validate_json(json.dumps(config, default=str)), MediaStore({}, 10**9))


def mixed_rows(adapter: OmniAdapter) -> list[Encoded]:
    """Text, every medium, several of one kind, orders that mix kinds, and clips shorter and longer than a second."""
    mixed = (
        picture(32, 32, seed=4),
        sound(20000, seed=5),
        film(3, seed=6),
        picture(64, 32, seed=7),
        "?",
        sound(seed=8),
    )
    return [
        adapter.encode([user(*content)])
        for content in (
            ["sum 1 + 2 = ?"],
            ["what colour ?", picture(seed=1)],
            [sound(5000, seed=2), "which tone ?"],
            ["which way ?", film(seed=3)],
            mixed,
        )
    ]
