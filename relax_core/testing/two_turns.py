"""Plays of two turns, some about a medium, that show whether an engine samples the same bits wherever it lives."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from relax_core.media import MediaStore
from relax_core.testing.engines import request
from relax_core.testing.tiny import tiny_adapter
from relax_core.types import Encoded, MediaRef

if TYPE_CHECKING:
    from typing import TypeVar

    from relax_core.interfaces import Completion, Engine

    Store = TypeVar("Store", bound=MediaStore)

IMAGE = tiny_adapter(images=True).ids["<image>"]


def stored() -> MediaStore:
    return filled(MediaStore({}, max_bytes=1 << 20))


def filled(media: Store) -> Store:
    """The store, with the features of three colours, held once."""
    for i, key in enumerate(("red", "green", "blue")):
        media.put(key, {"colour": 2**i * np.eye(3, dtype=np.float32)[i]})
        media.retain([key])
    return media


async def play(e: Engine, member: int, entered: Engine | None = None) -> list[Completion]:
    """Two turns, some about an image; entered by the caller (by way of another client: ``entered``)."""
    key = ("red", "green", "blue")[member % 3]
    media = (MediaRef("image", key, 0, 1),) if member % 2 else ()
    ids, done = [IMAGE if member % 2 else 5, 6 + member % 5], []
    try:
        for turn in range(2):
            await asyncio.sleep(0.003 * ((member * 7 + turn) % 4))
            r = request(f"{member}", Encoded(ids, media), 3 + (5 * member) % 7, order=(member, turn))
            c = await e.generate(replace(r, key=r.key._replace(turn=turn)))
            done.append(c)
            ids = [*ids, *c.ids, 9]
    finally:
        (entered or e).leave("train")
    return done


async def plays(e: Engine) -> list[list[Completion]]:
    """Seven plays at once."""
    for _ in range(7):
        e.enter("train")
    return await asyncio.gather(*(play(e, m) for m in range(7)))
