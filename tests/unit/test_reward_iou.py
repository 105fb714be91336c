"""Reward ``iou``: boxes in text, and how well they overlap."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.iou import Iou

GOLD = [10, 20, 30, 60]


@pytest.mark.parametrize(
    "reply",
    [
        "[10, 20, 30, 60]",
        "[10,20,30,60]",
        "[10.0, 20.0, 3e1, 60.]",
        "[ 10 20 30 60 ]",
        "(10, 20, 30, 60)",
        "(10,20),(30,60)",
        "(10, 20) (30, 60)",
        "[[10, 20], [30, 60]]",
        "[[10, 20, 30, 60]]",
        "<box>10 20 30 60</box>",
        "<box>[10, 20, 30, 60]</box>",
        "<box>(10,20),(30,60)</box>",
        "<|box_start|>(10,20),(30,60)<|box_end|>",
        '{"bbox_2d": [10, 20, 30, 60], "label": "cat"}',
        '```json\n[{"bbox_2d": [10, 20, 30, 60], "label": "cat"}]\n```',
        '{"x1": 10, "y1": 20, "x2": 30, "y2": 60}',
        '{"label": "cat", "xmin": 10, "ymin": 20, "xmax": 30, "ymax": 60}',
        "{'left': 10, 'top': 20, 'right': 30, 'bottom': 60}",
        '{"x": 10, "y": 20, "width": 20, "height": 40}',
        '{"box": {"x": 10, "y": 20, "w": 20, "h": 40}}',
        "The cat is at [10, 20, 30, 60].",
        "First I saw [0, 0, 1, 1], but it is [10, 20, 30, 60]",
        "<think>[0, 0, 1, 1]</think> [10, 20, 30, 60]",
        "[0, 0, 1, 1]</think><answer>[10, 20, 30, 60]</answer> [5, 5, 6, 6]",
        "[10, 20, 30, 60]<|im_end|>",
    ],
)
def test_spellings_of_a_box(reply: str) -> None:
    assert rewarded(Iou, played(reply, answer=GOLD)) == 1.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("[10, 20, 30, 40]", 0.5),
        ("[20, 20, 40, 60]", 1 / 3),
        ("[10, 20, 50, 100]", 0.25),
        ("[30, 20, 50, 60]", 0.0),
        ("[100, 100, 110, 110]", 0.0),
        ("[-10, -20, 30, 60]", 800 / 3200),
        ("[30, 60, 10, 20]", 0.0),
        ("[30, 20, 10, 60]", 0.0),
        ("[10, 20, 10, 60]", 0.0),
        ("[10, 20, 30, 20]", 0.0),
        ("[nan, 20, 30, 60]", 0.0),
        ("[10, 20, 30, Infinity]", 0.0),
        ("[-inf, 20, 30, 60]", 0.0),
        ("[0, 0, 1e300, 1e300]", 0.0),
        ("[0, 0, 1e999, 1e999]", 0.0),
        ("[10, 20, 30, 60] and [nan, 0, 0, 0]", 0.0),
        ("[10, 20, 30]", 0.0),
        ("[10, 20, 30, 60, 70]", 0.0),
        ("['10', 20, 30, 60]", 0.0),
        ("10, 20, 30, 60", 0.0),
        ("no box", 0.0),
        ("", 0.0),
        ("<think>[10, 20, 30, 60]", 0.0),
        ("[10, 20, 30, 60] <answer>none</answer>", 0.0),
    ],
)
def test_overlaps_and_boxes_that_are_none(reply: str, right: float) -> None:
    assert rewarded(Iou, played(reply, answer=GOLD)) == pytest.approx(right)


def test_a_threshold_gives_zero_or_one() -> None:
    overlaps = {"[10, 20, 30, 40]": 1.0, "[10, 20, 30, 39]": 0.0, "[10, 20, 30, 60]": 1.0, "none": 0.0}
    assert {r: rewarded(Iou, played(r, answer=GOLD), threshold=0.5) for r in overlaps} == overlaps


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("[0, 0, 10, 10] [20, 20, 30, 30]", 1.0),
        ("[20, 20, 30, 30] [0, 0, 10, 10]", 1.0),
        ("[0, 0, 10, 10]", 0.5),
        ("[0, 0, 10, 10] [0, 0, 10, 10]", 0.5),
        ("[0, 0, 10, 10] [20, 20, 30, 30] [40, 40, 50, 50]", 2 / 3),
        ("[0, 0, 10, 5] [20, 20, 30, 30]", 0.75),
        ("[0, 0, 10, 10] [nan, 0, 1, 1]", 0.5),
        ("[]", 0.0),
    ],
)
def test_several_boxes_are_matched_and_guesses_cost(reply: str, right: float) -> None:
    gold = [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert rewarded(Iou, played(reply, answer=gold)) == pytest.approx(right)


def test_several_boxes_with_a_threshold_count_pairs() -> None:
    gold = [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert rewarded(Iou, played("[0, 0, 10, 6] [20, 20, 30, 24]", answer=gold), threshold=0.5) == 0.5


def test_an_empty_list_asks_for_no_box() -> None:
    assert rewarded(Iou, played("There is none: []", answer=[])) == 1.0
    assert rewarded(Iou, played("[0, 0, 1, 1]", answer=[])) == 0.0


def test_too_many_boxes_are_wrong() -> None:
    boxes = " ".join(["[0, 0, 1, 1]"] * 49 + ["[10, 20, 30, 60]"])
    assert rewarded(Iou, played(boxes, answer=GOLD)) == 1.0
    assert rewarded(Iou, played(f"[0, 0, 1, 1] {boxes}", answer=GOLD)) == 0.0
    assert rewarded(Iou, played(boxes, answer=GOLD), most=49) == 0.0


@pytest.mark.parametrize(
    ("reply", "settings"),
    [
        ("[10, 20, 20, 40]", {"format": "xywh"}),
        ("(10, 20), (30, 60)", {"format": "xywh"}),  # two points are corners
        ("[0.1, 0.1, 0.3, 0.3]", {"scale": "unit"}),
        ("[100, 100, 300, 300]", {"scale": "thousand"}),
        ("[10, 20, 30, 60]", {"scale": "pixels"}),
        ("[0.1, 0.1, 0.2, 0.2]", {"scale": "unit", "format": "xywh"}),
    ],
)
def test_forms_and_scales_of_a_reply(reply: str, settings: dict[str, Any]) -> None:
    found = played(reply, answer=GOLD, metadata={"width": 100, "height": 200})
    assert rewarded(Iou, found, **settings) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("answer", "settings"),
    [
        ([10, 20, 20, 40], {"gold_format": "xywh"}),
        ([0.1, 0.1, 0.3, 0.3], {"gold_scale": "unit", "scale": "pixels"}),
        ([100, 100, 300, 300], {"gold_scale": "thousand", "scale": "pixels"}),
        ("[10, 20, 30, 60]", {}),
        ("(10,20),(30,60)", {}),
        ({"x1": 10, "y1": 20, "x2": 30, "y2": 60}, {}),
        ({"x": 10, "y": 20, "w": 20, "h": 40}, {}),
        ([[10, 20, 30, 60]], {}),
        ([{"x1": 10, "y1": 20, "x2": 30, "y2": 60}], {}),
        ((10, 20.0, 30, 60), {}),
    ],
)
def test_spellings_of_an_answer(answer: Any, settings: dict[str, Any]) -> None:
    found = played("[10, 20, 30, 60]", answer=answer, metadata={"width": 100, "height": 200})
    assert rewarded(Iou, found, **settings) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "answer",
    [
        [10, 20, 30],
        [30, 60, 10, 20],
        [10, 20, 10, 60],
        [0, 0, float("inf"), 1],
        [0, 0, 1e12, 1],
        [True, 0, 2, 2],
        ["a", 0, 1, 1],
        {"a": 1},
        "no box",
        "[0, 0, 1, 1] [0, 0, 2, 2]",
        [[0, 0, 1, 1], [1, 1, 0, 0]],
        [[[0, 0, 1, 1]]],
        7,
    ],
)
def test_an_answer_that_is_no_box_is_an_error_of_the_row(answer: Any) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* cannot be read; allowed: a box"):
        rewarded(Iou, played("[0, 0, 1, 1]", answer=answer))


def test_pixels_need_the_size_of_the_image() -> None:
    for metadata in ({}, {"width": 100}, {"width": 0, "height": 5}, {"width": "100", "height": "200"}):
        with pytest.raises(DataError, match=r"task 't': width and height in the metadata are \["):
            rewarded(Iou, played("[0, 0, 1, 1]", answer=GOLD, metadata=metadata), scale="unit")
    with pytest.raises(ValidationError, match="gold_scale matters only where scale is another"):
        Iou.Config(gold_scale="unit")


def test_it_abstains_without_an_answer_and_for_failed_plays() -> None:
    assert rewarded(Iou, played("[0, 0, 1, 1]")) is None
    assert rewarded(Iou, played("[0, 0, 1, 1]", answer=GOLD, failed=True)) is None


@pytest.mark.parametrize(
    "piece", ["[", "[1,", "{", "[1 ", "(1,2)", "1", '{"a', '{"x1": 1,', "<box>", " ", "[1,2,3", "[1,2,3,4]"]
)
def test_a_hundred_thousand_characters_are_read_at_once(piece: str) -> None:
    started = time.process_time()
    rewarded(Iou, played(piece * (100_000 // len(piece)), answer=GOLD))
    assert time.process_time() - started < 2
