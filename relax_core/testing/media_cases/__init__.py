"""Media files of all kinds with what must come of each: a right tensor, or a row error that says why.

The files are written by Pillow, libsndfile and FFmpeg as they are asked for. In a test of your own modality::

    for case in image_cases():
        case.run(modality, folder)
"""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.testing.media_cases import broken_images, broken_videos, images, sounds, videos
from relax_core.testing.media_cases.case import Case

__all__ = ["Case", "image_cases", "sound_cases", "video_cases"]


def image_cases() -> Iterator[Case]:
    yield from images.cases()
    yield from broken_images.cases()


def sound_cases() -> Iterator[Case]:
    yield from sounds.cases()


def video_cases() -> Iterator[Case]:
    yield from videos.cases()
    yield from broken_videos.cases()
