"""The parts of a reply: reasoning, answer tags, boxes, tokens at the end."""

from __future__ import annotations

import time

import pytest

from relax_envs.rewards.reply import AnswerPart, answer_part, boxed, boxed_spans, final_part, tagged, without_end_tokens


@pytest.mark.parametrize(
    ("reply", "final"),
    [
        ("4", "4"),
        ("<think>a</think>4", "4"),
        ("a</think>4", "4"),
        ("</think>4", "4"),
        ("<think>a</think><think>b</think>4", "4"),
        ("a</think>b</think>\n4\n", "4"),
        ("<think>a", ""),
        ("4<think>a", "4"),
        ("a</think>4<think>b", "4"),
        ("a</think>", ""),
        ("4<|im_end|>", "4"),
        ("4 </s> <pad> <pad>", "4"),
        ("", ""),
    ],
)
def test_what_comes_after_the_reasoning(reply: str, final: str) -> None:
    assert final_part(reply) == final


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("4<|im_end|>\n", "4"),
        ("4<|endoftext|><|endoftext|>", "4"),
        ("4<｜end▁of▁sentence｜>", "4"),
        ("4<end_of_turn>\n<eos>", "4"),
        ("<|im_end|>", ""),
        ("<|im_end|> 4", "<|im_end|> 4"),
        ("a > b", "a > b"),
        ("<b>4</b>", "<b>4</b>"),
        ("1 <| 2 |>", "1 <| 2 |>"),
    ],
)
def test_tokens_that_end_a_turn(text: str, plain: str) -> None:
    assert without_end_tokens(text) == plain


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{4}", "4"),
        ("\\boxed {4}", "4"),
        ("\\boxed 4", "4"),
        ("\\boxed4", "4"),
        ("\\fbox{4}", "4"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{\\boxed{4}}", "4"),
        ("\\boxed{}", ""),
        ("\\boxed", None),
        ("\\boxedx{4}", None),
        ("boxed{4}", None),
        ("4", None),
    ],
)
def test_the_last_complete_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>4</answer>", "4"),
        ("<answer>\n4\n</answer>", "4"),
        ("<answer>3</answer><answer>4</answer>", "4"),
        ("<answer>3</answer><answer>4", "3"),
        ("<answer><answer>4</answer></answer>", "4"),
        ("</answer>4<answer>", None),
        ("<answer></answer>", ""),
        ("4", None),
    ],
)
def test_the_last_complete_tags(text: str, content: str | None) -> None:
    assert tagged(text, "answer") == content


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("reply", "<think>a</think> \\boxed{1} <answer>2</answer>"),
        ("final", "\\boxed{1} <answer>2</answer>"),
        ("answer", "2"),
        ("boxed", "1"),
        ("auto", "2"),
    ],
)
def test_parts(part: AnswerPart, found: str) -> None:
    assert answer_part("<think>a</think> \\boxed{1} <answer>2</answer>", part) == found
    assert (answer_part("3", part) is None) == (part in ("answer", "boxed"))


def test_tags_and_boxes_of_the_reasoning_are_no_answer() -> None:
    reply = "<think>\\boxed{1} <answer>2</answer></think> 3"
    assert answer_part(reply, "auto") == "3"
    assert answer_part(reply, "answer") is None and answer_part(reply, "boxed") is None


@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "\\boxed{}", "{", "<answer>", "</answer>", "<answer></answer>", "<eos>", "<|a|>", " ", "</think>"],
)
def test_time_is_linear(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    final_part(text), boxed_spans(text), tagged(text, "answer"), answer_part(text, "auto")
    assert time.process_time() - started < 2
