"""Pictures cut and turned. Pixels are copied, not computed, wherever that can be.

Shape legend: H height, W width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_core.types import Decoded
from relax_plugin_deepeyes.boxes import Box


def crop(picture: Decoded, box: Box, least_side: int = 1) -> Decoded:
    """The pixels inside ``box``, exactly; only where a side is shorter than ``least_side`` are they scaled up."""
    pixels_HW3 = np.ascontiguousarray(picture.data[box.top : box.bottom, box.left : box.right])
    grow = least_side / min(box.width, box.height)
    if grow > 1:
        size = (max(least_side, round(box.width * grow)), max(least_side, round(box.height * grow)))
        pixels_HW3 = np.asarray(Image.fromarray(pixels_HW3).resize(size, Image.Resampling.BICUBIC))
    return Decoded("image", pixels_HW3)


def rotate(picture: Decoded, degrees: float) -> Decoded:
    """The whole picture turned clockwise, on a black ground that is as large as it needs to be.

    Quarter turns are exact, others interpolated (bicubic).
    """
    quarters, rest = divmod(degrees % 360, 90)
    if rest == 0:
        turned_HW3: NDArray[np.uint8] = np.ascontiguousarray(np.rot90(picture.data, -int(quarters)))
    else:
        whole = Image.fromarray(picture.data)
        turned_HW3 = np.asarray(whole.rotate(-degrees, resample=Image.Resampling.BICUBIC, expand=True))
    return Decoded("image", turned_HW3)
