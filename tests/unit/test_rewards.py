"""Rewards exact and format: right, wrong, abstaining."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from relax_core.testing.reward_plays import played, rewarded
from relax_core.types import Stop, Turn, message
from relax_envs.rewards.exact import Exact
from relax_envs.rewards.format import Format


@pytest.mark.parametrize(
    ("reply", "answer", "settings", "reward"),
    [
        ("red", "red", {}, 1.0),
        (" red\n", "red", {}, 1.0),
        (" red", "red", {"strip": False}, 0.0),
        ("Red", "red", {}, 0.0),
        ("Red", "red", {"ignore_case": True}, 1.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("red blue", "red", {}, 0.0),
        ("", "red", {}, 0.0),
        ("", "", {}, 1.0),
        ("3", 3, {}, 1.0),
        ("3.0", 3, {}, 0.0),
        ("True", True, {}, 1.0),
        ("blue", ["red", "blue"], {}, 1.0),
        ("green", ("red", "blue"), {}, 0.0),
        ("anything", [], {}, 0.0),
        ("red", None, {}, None),
        ("red<|im_end|>", "red", {}, 1.0),
        ("</s>", "</s>", {}, 1.0),
        ("<think>blue</think> red", "red", {}, 0.0),
        ("<think>blue</think> red", "red", {"part": "final"}, 1.0),
        ("blue</think>red</s>", "red", {"part": "final"}, 1.0),
        ("<think>red", "red", {"part": "final"}, 0.0),
        ("<think>red", "", {"part": "final"}, 1.0),
        ("so <answer> red </answer>", "red", {"part": "answer"}, 1.0),
        ("red", "red", {"part": "answer"}, 0.0),
        ("<answer>red</answer> <answer>blue</answer>", "red", {"part": "answer"}, 0.0),
        ("it is \\boxed{red}.", "red", {"part": "boxed"}, 1.0),
        ("it is \\boxed{\\boxed{red}}.", "red", {"part": "boxed"}, 1.0),
        ("\\boxed{red", "red", {"part": "boxed"}, 0.0),
        ("\\boxed{blue} <answer>red</answer>", "red", {"part": "auto"}, 1.0),
        ("\\boxed{red} it is", "red", {"part": "auto"}, 1.0),
        ("reason</think> red", "red", {"part": "auto"}, 1.0),
        ("答案</think>红色", "红色", {"part": "final"}, 1.0),
    ],
)
def test_exact(reply: str, answer: Any, settings: dict[str, Any], reward: float | None) -> None:
    assert rewarded(Exact, played(reply, answer=answer), **settings) == reward


def test_a_play_without_a_reply_is_wrong_and_a_failed_one_is_not_scored() -> None:
    assert rewarded(Exact, played(answer="red")) == 0.0
    assert rewarded(Format, played(), words=1) == 0.0
    assert rewarded(Exact, played("red", answer="red", failed=True)) is None
    assert rewarded(Format, played("red", failed=True), words=1) is None


@pytest.mark.parametrize(
    ("reply", "settings", "reward"),
    [
        ("red", {"words": 1}, 1.0),
        (" red ", {"words": 1}, 1.0),
        ("red <|im_end|>", {"words": 1}, 1.0),
        ("red red", {"words": 1}, 0.0),
        ("", {"words": 1}, 0.0),
        ("<a>x\ny</a>", {"pattern": "<a>.*</a>"}, 1.0),
        ("<a>x</a><|im_end|>", {"pattern": "<a>.*</a>"}, 1.0),
        ("<a>x</a><|im_end|>", {"pattern": r"<a>.*</a><\|im_end\|>"}, 1.0),
        ("<a>x</a>!", {"pattern": "<a>.*</a>"}, 0.0),
        ("one two", {"pattern": "[a-z ]+", "words": 2}, 1.0),
        ("one 2", {"pattern": "[a-z ]+", "words": 2}, 0.0),
    ],
)
def test_format(reply: str, settings: dict[str, Any], reward: float) -> None:
    assert rewarded(Format, played(reply), **settings) == reward


GOOD = "<think>line one\nline two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (GOOD, 1.0),
        (f"\n {GOOD} \n", 1.0),
        (f"{GOOD}<|im_end|>", 1.0),
        (f"{GOOD}</s>", 1.0),
        (f"{GOOD}\n<|im_end|>\n", 1.0),
        (f"{GOOD}<|eot_id|><|endoftext|>", 1.0),
        (f"{GOOD}<｜end▁of▁sentence｜>", 1.0),
        ("<think>思考</think><answer>四</answer>", 1.0),
        ("<think>a < b and <b>bold</b></think><answer>1 > 0</answer>", 1.0),
        ("<think>a</think>\n\n\n<answer>\n4\n</answer>", 1.0),
        (f"Sure! {GOOD}", 0.0),
        (f"{GOOD} Hope this helps!", 0.0),
        (f"{GOOD}<|im_end|> more", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<answer>4</answer></think>", 0.0),
        ("<think>a<answer>4</think></answer>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think><think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a</think></think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("<think>a<answer>4</answer>", 0.0),
        ("a</think><answer>4</answer>", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think> \n</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("</think>a<think><answer>4</answer>", 0.0),
        ("<Think>a</Think><Answer>4</Answer>", 0.0),
        ("<think >a</think><answer>4</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_without_settings_format_asks_for_reasoning_and_an_answer_in_tags(reply: str, reward: float) -> None:
    assert rewarded(Format, played(reply)) == reward
    assert rewarded(Format, played(reply), tags=("think", "answer")) == reward


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("reasoning</think>\n<answer>4</answer>", 1.0),
        ("\nline\nline\n</think><answer>4</answer><|im_end|>", 1.0),
        ("<think>reasoning</think><answer>4</answer>", 0.0),
        ("</think><answer>4</answer>", 0.0),
        ("a</think>b</think><answer>4</answer>", 0.0),
        ("reasoning<answer>4</answer>", 0.0),
        ("a<answer>4</answer></think>", 0.0),
        ("a</think><answer>4</answer>!", 0.0),
    ],
)
def test_the_prompt_may_have_opened_the_first_tag(reply: str, reward: float) -> None:
    assert rewarded(Format, played(reply), think_in_prompt=True) == reward


@pytest.mark.parametrize(
    ("reply", "settings", "reward"),
    [
        ("<think>\n\n</think>\n<answer>4</answer>", {"empty": True}, 1.0),
        ("</think><answer></answer>", {"empty": True, "think_in_prompt": True}, 1.0),
        ("<plan>p</plan><code>c</code><out>o</out>", {"tags": ("plan", "code", "out")}, 1.0),
        ("<plan>p</plan><out>o</out><code>c</code>", {"tags": ("plan", "code", "out")}, 0.0),
        ("<answer>4</answer>", {"tags": ("answer",)}, 1.0),
        (GOOD, {"tags": ("answer",)}, 0.0),
        (GOOD, {"tags": ("think", "answer"), "pattern": r".*<answer>\d+</answer>"}, 1.0),
        (GOOD, {"tags": ("think", "answer"), "pattern": r".*<answer>[a-z]+</answer>"}, 0.0),
        (GOOD, {"tags": ("think", "answer"), "words": 5}, 1.0),
        ("no tags", {"words": 2}, 1.0),
    ],
)
def test_tags_and_other_conditions(reply: str, settings: dict[str, Any], reward: float) -> None:
    assert rewarded(Format, played(reply), **settings) == reward


@pytest.mark.parametrize(
    ("stop", "ended", "reward"),
    [(Stop.EOS, True, 1.0), (Stop.LENGTH, True, 0.0), (Stop.TURNS, True, 0.0), (Stop.LENGTH, False, 1.0)],
)
def test_format_may_ask_for_an_end(stop: Stop, ended: bool, reward: float) -> None:
    assert rewarded(Format, played("red", stop=stop), words=1, ended=ended) == reward
    assert rewarded(Format, played(), ended=True) == 0.0


def test_the_last_turn_counts() -> None:
    found = played("red", answer="red")
    found.turns.append(Turn((), message("assistant", "blue"), Stop.LENGTH, 1))
    assert rewarded(Exact, found) == 0.0
    assert rewarded(Format, found, ended=True) == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pattern": "("}, r"'\(' is no regular expression: missing \)"),
        ({"words": 0}, "greater than 0"),
        ({"tags": ()}, "list one tag or more"),
        ({"tags": ("think", "think")}, "each once"),
        ({"tags": ("<think>",)}, "should match pattern"),
        ({"words": 1, "think_in_prompt": True}, "think_in_prompt is about tags, and none are asked for"),
        ({"pattern": "x", "empty": True}, "empty is about tags"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Format.Config(**settings)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<r>why</r><s>red</s>", 1.0),
        ("<r>why</r>\n<s>red</s>\n", 1.0),
        ("<r>why</r><s>red</s></s>", 1.0),
        ("<r>why</r><s>red</s><|im_end|>", 1.0),
        ("<r>why</r><s>red</s></s><|im_end|>", 1.0),
        ("<r>why</r><s>red", 0.0),
        ("<r>why</r><s></s>", 0.0),
        ("<r>why</r></s>", 0.0),
        ("<r>why</r><s>red</s> and", 0.0),
    ],
)
def test_a_tag_that_is_asked_for_is_no_special_token(reply: str, reward: float) -> None:
    assert rewarded(Format, played(reply), tags=("r", "s")) == reward
    if "</s></s>" not in reply and "<s></s>" not in reply:
        assert rewarded(Format, played(reply), pattern=r"<r>[^<]+</r>\s*<s>[^<]+</s>") == reward
