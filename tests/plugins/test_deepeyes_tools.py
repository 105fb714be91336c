"""The tools of relax-plugin-deepeyes: which pixels, samples and frames a call shows, and what it is told otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.testing.noise import film, picture, sound
from relax_core.types import CallError, Decoded, Image, MediaKind, Message, Text, ToolCall, ToolResult
from relax_envs.tools import Tool, ToolError, answer
from relax_plugin_deepeyes.boxes import Box, BoxRules, read_box
from relax_plugin_deepeyes.looking import ListenCloser, Look, Rotate, Rules, WatchCloser, ZoomIn
from relax_plugin_deepeyes.pictures import crop, rotate
from relax_plugin_deepeyes.spans import SpanRules, cut_sound, cut_video, duration, read_span

EXACT = BoxRules(least_side=1)


def decoded(part: Any) -> Decoded:
    assert isinstance(part.source, Decoded)
    return part.source


# --- boxes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "rules", "box"),
    [
        ([10, 20, 40, 60], {}, (10, 20, 40, 60)),
        ([10.2, 20.7, 39.1, 59.9], {}, (10, 20, 40, 60)),  # pixels that are partly inside
        ([-5, -5, 1000, 1000], {}, (0, 0, 100, 80)),
        ([100, 250, 400, 750], {"unit": "thousandths"}, (10, 20, 40, 60)),
        ([0.1, 0.25, 0.4, 0.75], {"unit": "fractions"}, (10, 20, 40, 60)),
        ([40, 30, 60, 50], {"least_side": 28}, (36, 26, 64, 54)),  # grown about its centre
        ([40, 30, 50, 35], {"least_side": 20}, (25, 22, 65, 42)),  # in proportion
        ([0, 0, 10, 10], {"least_side": 28}, (0, 0, 28, 28)),  # inside of the picture
        ([95, 75, 100, 80], {"least_side": 28}, (72, 52, 100, 80)),
        ([0, 0, 100, 2], {"least_side": 28}, (0, 0, 100, 28)),
        ([0, 0, 5, 5], {"least_side": 200}, (0, 0, 100, 80)),  # the whole of a picture that is smaller
    ],
)
def test_a_box_is_the_pixels_that_it_says(numbers: Any, rules: Any, box: Any) -> None:
    assert read_box(numbers, 100, 80, BoxRules(**{"least_side": 1} | rules)) == box


@pytest.mark.parametrize(
    ("numbers", "rules", "words"),
    [
        ([40, 20, 10, 60], {}, "[40, 20, 10, 60] is empty: write [x1, y1, x2, y2] with x1 < x2 and y1 < y2"),
        ([10, 20, 10, 60], {}, "empty"),
        ([100, 0, 120, 10], {}, "lies outside: the picture reaches from [0, 0] to [100, 80]"),
        ([-9, -9, 0, 10], {}, "lies outside"),
        ([90, 0, 101, 10], {"outside": "refuse"}, "lies outside"),
        ([0, 0, 1001, 10], {"outside": "refuse", "unit": "thousandths"}, "from [0, 0] to [1000, 1000]"),
        ([0, 0, 100, 1], {"most_ratio": 50}, "too narrow: one side may be 50 times the other at most"),
        ([0, 0, 1], {}, "not four numbers"),
        ([0, 0, float("nan"), 1], {}, "not four numbers"),
    ],
)
def test_a_box_that_cannot_be_is_refused_in_words(numbers: Any, rules: Any, words: str) -> None:
    with pytest.raises(ToolError) as error:
        read_box(numbers, 100, 80, BoxRules(**{"least_side": 1} | rules))
    assert words in str(error.value) and "\n" not in str(error.value)


NUMBER = st.floats(-1e4, 1e4) | st.integers(-300, 300)


@given(
    st.lists(NUMBER, min_size=4, max_size=4),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 64),
    st.sampled_from(["pixels", "thousandths", "fractions"]),
)
def test_whatever_box_is_read_lies_in_the_picture(
    numbers: list[float], width: int, height: int, least: int, unit: Any
) -> None:
    try:
        box = read_box(numbers, width, height, BoxRules(least_side=least, unit=unit))
    except ToolError:
        return
    assert Box(0, 0, width, height).covers(box)
    assert box.width >= min(least, width) and box.height >= min(least, height)


def test_a_crop_is_the_very_pixels() -> None:
    whole = decoded(picture(50, 70))
    found = crop(whole, Box(10, 5, 30, 45), 20)
    assert (found.data == whole.data[5:45, 10:30]).all() and found.data.flags.c_contiguous and found.kind == "image"


def test_a_crop_of_a_picture_smaller_than_the_least_side_is_scaled_up() -> None:
    found = crop(decoded(picture(10, 20)), Box(0, 0, 20, 10), 28)
    assert found.data.shape == (28, 56, 3)


@pytest.mark.parametrize(("degrees", "quarters"), [(90, -1), (-90, 1), (180, 2), (270, 1), (360, 0), (-450, 1)])
def test_quarter_turns_are_exact_and_positive_ones_go_clockwise(degrees: float, quarters: int) -> None:
    whole = decoded(picture(6, 10))
    assert (rotate(whole, degrees).data == np.rot90(whole.data, quarters)).all()


def test_other_angles_keep_the_whole_picture() -> None:
    white = Decoded("image", np.full((40, 40, 3), 255, np.uint8))
    found = rotate(white, 45).data
    assert found.shape[0] == found.shape[1] and 56 <= len(found) <= 58
    assert found[28, 28].tolist() == [255] * 3 and found[0, 0].tolist() == [0] * 3
    assert found.mean() * found.size == pytest.approx(white.data.mean() * white.data.size, rel=0.05)


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "rules", "span"),
    [
        ([1, 2.5], {}, (1, 2.5)),
        ([-1, 2], {}, (0, 2)),
        ([9, 30], {}, (9, 10)),
        ([5, 5.1], {"least_seconds": 1.0}, (4.55, 5.55)),
        ([0, 0.1], {"least_seconds": 1.0}, (0, 1)),
        ([9.9, 10], {"least_seconds": 1.0}, (9, 10)),
        ([3, 4], {"least_seconds": 60.0}, (0, 10)),
    ],
)
def test_a_span_is_the_time_that_it_says(numbers: Any, rules: Any, span: Any) -> None:
    assert read_span(numbers, 10.0, SpanRules(**rules)) == pytest.approx(span)


@pytest.mark.parametrize(
    ("numbers", "rules", "words"),
    [
        ([2, 1], {}, "[2, 1] is empty: write [start, end] in seconds with start < end"),
        ([10, 11], {}, "lies outside: the recording lasts from 0 to 10 seconds"),
        ([-2, 0], {}, "lies outside"),
        ([9, 11], {"outside": "refuse"}, "lies outside"),
        ([9], {}, "not two numbers"),
    ],
)
def test_a_span_that_cannot_be_is_refused_in_words(numbers: Any, rules: Any, words: str) -> None:
    with pytest.raises(ToolError) as error:
        read_span(numbers, 10.0, SpanRules(**rules))
    assert words in str(error.value)


def test_a_part_of_a_sound_is_its_very_samples_and_louder_only_as_far_as_there_is_room() -> None:
    whole = Decoded("audio", np.linspace(-0.1, 0.1, 1600, dtype=np.float32), 1600)
    assert duration(whole) == 1.0
    assert (cut_sound(whole, 0.25, 0.5).data == whole.data[400:800]).all()
    assert np.allclose(cut_sound(whole, 0.25, 0.5, 6.0206).data, 2 * whole.data[400:800], rtol=1e-4)
    assert np.abs(cut_sound(whole, 0.0, 1.0, 60.0).data).max() == pytest.approx(1.0)
    loud = Decoded("audio", np.full(1600, 2.0, np.float32), 1600)
    assert (cut_sound(loud, 0.0, 1.0, 20.0).data == loud.data).all(), "what is too loud already stays"


def test_a_part_of_a_video_is_all_of_its_frames_and_slower() -> None:
    whole = decoded(film(8, seed=1, rate=4.0))
    assert duration(whole) == 2.0
    found = cut_video(whole, 0.5, 1.25, 0.25)
    assert (found.data == whole.data[2:5]).all() and found.rate == 1.0
    assert (cut_video(whole, 0.6, 0.7).data == whole.data[2:3]).all(), "between two frames: the one that is shown"


def test_a_part_of_a_video_keeps_the_times_of_its_frames() -> None:
    whole = Decoded("video", np.zeros((4, 8, 8, 3), np.uint8), 2.0, times=(0.0, 0.1, 0.7, 1.5))
    found = cut_video(whole, 0.1, 1.0, 0.5)
    assert found.times == pytest.approx((0.0, 1.2)) and found.rate == 1.0 and duration(whole) == 2.0


# --- tools ------------------------------------------------------------------------------------------------------------

PICTURES = [decoded(picture(60, 80, seed=i)) for i in range(2)]
HEARD = decoded(sound(16000, seed=1))
SEEN = decoded(film(8, seed=1, rate=4.0))


async def given_media(kind: MediaKind, index: int) -> Decoded:
    media = {"image": PICTURES, "audio": [HEARD], "video": [SEEN]}[kind]
    if index >= len(media):
        raise ToolError(f"There is no {kind} {index}.")
    return media[index]


def ask(tool: Tool, arguments: Mapping[str, Any], name: str | None = None) -> Any:
    """What a call with these arguments gives; the text of an error."""

    class Chat:
        def count_calls(self, n: int) -> None: ...

    calls: list[ToolCall | CallError] = [ToolCall(name or tool.name, arguments)]
    message: Message = asyncio.run(answer(calls, [tool], cast("Any", Chat()), limit=1000))
    [result] = message.parts
    assert isinstance(result, ToolResult)
    return [part.text if isinstance(part, Text) else decoded(part) for part in result.parts]


def tool(cls: type[Look], **more: Any) -> Look:
    return cls(given_media, Rules(boxes=EXACT), **more)


def test_each_tool_shows_what_it_is_asked_for() -> None:
    where: list[Any] = []
    zoom = tool(ZoomIn, note=where.append)
    assert (ask(zoom, {"bbox_2d": [10, 5, 30, 45]})[0].data == PICTURES[0].data[5:45, 10:30]).all()
    assert (
        ask(zoom, {"bbox_2d": [1, 2, 3, 4], "label": "an apple", "image": 1})[0].data == PICTURES[1].data[2:4, 1:3]
    ).all()
    assert where == [(10, 5, 30, 45), (1, 2, 3, 4)]
    assert (ask(tool(Rotate), {"angle": 180})[0].data == np.rot90(PICTURES[0].data, 2)).all()
    heard = ask(tool(ListenCloser), {"span": [0.25, 0.5], "gain_db": 0})[0]
    assert (heard.data == HEARD.data[4000:8000]).all() and heard.kind == "audio"
    seen = ask(tool(WatchCloser), {"span": [0.5, 1], "speed": 0.5})[0]
    assert (seen.data == SEEN.data[2:4]).all() and seen.rate == 2.0


def test_a_hint_stands_behind_what_is_shown() -> None:
    shown, hint = ask(tool(ZoomIn, hint="What do you see?"), {"bbox_2d": [0, 0, 9, 9]})
    assert shown.data.shape == (9, 9, 3) and hint == "What do you see?"


@pytest.mark.parametrize(
    ("cls", "arguments", "words"),
    [
        (ZoomIn, {}, '"bbox_2d" is missing'),
        (ZoomIn, {"bbox_2d": [1, 2, 3]}, '"bbox_2d" must have at least 4 items'),
        (ZoomIn, {"bbox_2d": ["1", 2, 3, 4]}, '"bbox_2d".0 must be a number'),
        (ZoomIn, {"bbox_2d": [1, 2, 3, True]}, '"bbox_2d".3 must be a number'),
        (ZoomIn, {"bbox_2d": [1, 2, 3, 4], "image": -1}, '"image" must be at least 0'),
        (ZoomIn, {"bbox_2d": [1, 2, 3, 4], "bbox": 1}, 'there is no argument "bbox"'),
        (ZoomIn, {"bbox_2d": [1, 2, 3, 4], "image": 2}, "There is no image 2."),
        (ZoomIn, {"bbox_2d": [90, 2, 95, 4]}, "lies outside"),
        (Rotate, {"angle": "90"}, '"angle" must be a number'),
        (ListenCloser, {"span": [0, 1], "gain_db": 100}, '"gain_db" must be at most 60'),
        (ListenCloser, {"span": [2, 3]}, "lies outside"),
        (WatchCloser, {"span": [0, 1], "speed": 0}, '"speed" must be at least 0.01'),
    ],
)
def test_a_call_that_cannot_be_is_told_why_and_shows_nothing(cls: type[Look], arguments: Any, words: str) -> None:
    where: list[Any] = []
    [said] = ask(tool(cls, note=where.append), arguments)
    assert words in said and not where


def test_large_media_are_cut_beside_other_plays() -> None:
    """A big picture is turned in a thread: the loop goes on meanwhile."""
    big = Decoded("image", np.zeros((1500, 1500, 3), np.uint8))

    async def source(kind: MediaKind, index: int) -> Decoded:
        return big

    async def both() -> int:
        turned = asyncio.create_task(Rotate(source, Rules())({"angle": 30}))
        ticks = 0
        while not turned.done():
            ticks += 1
            await asyncio.sleep(0)
        assert isinstance(await turned, Image)
        return ticks

    assert asyncio.run(both()) > 3
