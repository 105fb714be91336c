"""Reward ``choice``: what counts as choosing, what does not, and what an answer may be."""

from __future__ import annotations

import string
import time
from typing import Any

import pytest

from relax_core.errors import DataError
from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.choice import Choice
from relax_envs.rewards.choice_reading import ChoiceReader
from relax_envs.rewards.reply import final_part

CITIES = ["London", "Paris", "Rome", "Berlin"]


def stated(reply: str, texts: tuple[str, ...] = (), labels: str = string.ascii_uppercase[:10]) -> str:
    """The labels that a reply states, in order, without anything between."""
    return "".join(sorted(ChoiceReader(labels, texts).read(final_part(reply))))


@pytest.mark.parametrize(
    "reply",
    """B|(B)|B.|B)|B:|[B]|{B}|"B"|'B'|`B`|$B$|\\(B\\)|b|(b)|b.|b)|B. Paris|B) Paris|B: Paris|B - Paris|(B) Paris|B.Paris
    |b. paris|**B**|**B. Paris**|*B*|__B__|> B|- B|### B|Option B|option (b)|Choice B|Answer B|Answer (B)|Answer: B
    |answer: b|Answer:B|ANSWER: B|Ans: B|Ans. B|Answer = B|Correct Answer - B|**Answer:** B|**Answer: (B)**
    |The answer is B|the answer is b.|The answer is **B. Paris**|The answer is (B).|The answer is: B|The answer is "B".
    |The best answer is B.|My final answer is option (B).|correct option: b|The correct answer is option B: Paris
    |The answer to the question about Paris is B|The answer, which is not obvious, is B|The solution is B
    |The answer is B because Paris is the capital|The answer is B, not C.|The answer is not A but B.|It is B.|It's B!
    |So B|so the answer is: B|Therefore, the correct option is (B).|Thus B.|Hence, B.|A is wrong, so B|=> B
    |I choose B|I would choose (B) because it fits|I'd go with option B.|I'm going with B|I pick B; A seems off
    |I choose B over A|B is correct|(B) is right|Option B is the correct answer|I believe B is the best choice
    |I think B|I think it is (B)|Paris (B)|The capital is Paris, which is option B.|Definitely B.|B it is
    |B, because it is the capital|B because it is|B, since A is too small|Since A is too small, B.|B (not A)
    |A, no: B is right
    |\\boxed{B}|\\boxed{b}|\\boxed{(B)}|\\boxed{B. Paris}|\\boxed{\\text{B}}|\\boxed{\\text{(B)}}|\\boxed{\\textbf{(B)}}
    |\\boxed{\\mathrm{B}}|\\fbox{B}|\\boxed B|$\\boxed{\\text{B}}$|The final answer is $\\boxed{B}$.
    |\\boxed{B}, not \\boxed{A}
    |<answer>B</answer>|<answer>b. Paris</answer>|<answer>(B)</answer>|<answer>Option B</answer>
    |<answer>The answer is B</answer>|<answer>\\boxed{B}</answer>|A. <answer>B</answer>
    |选B|选 B|选择B|我选择 B。|故选B|因此选B。|所以答案选B|答案：B|答案:B|答案是B|答案为B。|答案应该是B
    |答案：(B)|答案是B，因为巴黎是首都
    |正确选项：B|正确答案是选项B|B是正确的|选项A不正确，选项B正确|A错误，B正确，故选B|答案不是A，而是B|（B）|【B】|Ｂ|（Ｂ）巴黎
    |La respuesta es B|Die Antwort ist B.|正解はB|정답은 B
    |B<|im_end|>""".replace("\n    |", "|")
    .replace("<|im_end|>", "<im_end>")
    .split("|"),
)
def test_spellings_of_one_choice(reply: str) -> None:
    assert stated(reply.replace("<im_end>", "<|im_end|>").strip()) == "B"


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("Answer:\n\nB", "B"),
        ("The answer is\n\n(B)", "B"),
        ("### Final Answer\n**B**", "B"),
        ("B\n\nParis is the capital.", "B"),
        ("B. Paris\nBecause it is the capital, and A is not.", "B"),
        ("Answer: B\n\nExplanation: A is too cold and C is too far.", "B"),
        ("Answer: B\nExplanation: option C is wrong, so D is also wrong", "B"),
        ("The answer is B.\n\nLet me know if you have questions!", "B"),
        ("A. London\nB. Paris\nC. Rome\nAnswer: B", "B"),
        ("Options:\nA. London\nB. Paris\n\nThe answer is B", "B"),
        ("A: too small.\nB: right.\nC: too big.\n\nB", "B"),
        ("A) no\nB) yes\nAnswer: B) yes", "B"),
        ("Answer: A\nWait, actually\nB", "B"),
        ("Answer: A\nAnswer: B", "B"),
        ("The answer is A. Let me check again. No: the answer is B.", "B"),
        ("I first took \\boxed{A}, but after looking at all of it once more it must be \\boxed{B}", "B"),
        ("<think>The answer is A</think>B", "B"),
        ("It looks like A</think>\nThe answer is B.", "B"),
        ("<think>The answer is B", ""),
        ("<answer>A</answer> Sorry, that was wrong in more than one respect. <answer>B</answer>", "B"),
    ],
)
def test_what_is_stated_last_counts(reply: str, right: str) -> None:
    assert stated(reply) == right


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "   ",
        "I think a dog",
        "a dog",
        "A dog",
        "An apple",
        "It's a dog",
        "The answer is a dog",
        "The answer is A dog",
        "I am not sure",
        "I don't know",
        "It's a",
        "Vitamin B",
        "The answer is vitamin B",
        "Plan B",
        "The answer is B-52",
        "The answer is E=mc^2",
        "Answer: 5",
        "None of the above",
        "<answer></answer>",
        "<answer>I don't know</answer>",
    ],
)
def test_words_are_no_choices(reply: str) -> None:
    assert stated(reply) == ""


@pytest.mark.parametrize(
    "reply",
    [
        "Not A",
        "not (A)",
        "Not A?",
        "The answer is not B.",
        "B is not correct",
        "B is wrong",
        "(A) is incorrect",
        "Neither A nor B",
        "<answer>not B</answer>",
        "排除选项A",
        "不选A",
        "选项A不正确",
    ],
)
def test_what_is_denied_is_not_stated(reply: str) -> None:
    assert stated(reply) == ""


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("B is wrong, so C", "C"),
        ("B is incorrect. C is correct.", "C"),
        ("Not B, but C", "C"),
        ("It can't be A. It must be C.", "C"),
        ("The answer is neither A nor B; it is C.", "C"),
        ("A, B and D are incorrect. The answer is C", "C"),
        ("The wrong answer is A. The right answer is C", "C"),
        ("Let A be a set. C is the answer", "C"),
    ],
)
def test_a_denied_choice_beside_a_stated_one(reply: str, right: str) -> None:
    assert stated(reply) == right


@pytest.mark.parametrize(
    "reply",
    [
        "A or B",
        "a or b",
        "The answer is A or B",
        "The answer is either A or B.",
        "A. London or B. Paris",
        "B. Paris or C",
        "\\boxed{A} or \\boxed{B}",
        "<answer>A or B</answer>",
        "maybe B or C",
        "A或B",
    ],
)
def test_alternatives_state_nothing(reply: str) -> None:
    assert stated(reply) == ""


@pytest.mark.parametrize(
    "hedge",
    [
        "Either A or B",
        "either A or B, hard to say",
        "I think A or B",
        "I'd say A or B",
        "Maybe A or B",
        "Probably A or B",
        "A or B probably",
        "A or B, I think",
        "Could be A or B",
        "Not sure: A or B",
        "Between A and B",
        "I'm torn between A and B",
        "A and/or B",
        "Any of A, B",
        "Either **A** or **B**",
        "Either (A) or (B)",
        "Either option A or option B",
        "Either A. London or B. Paris",
        "Either A or B is fine",
        "The answer is A and/or B",
        "The answer is one of A, B",
        "A or maybe B",
        "A, maybe B",
        "A vs B",
        "A (or B)",
        "A? Or B?",
        "A or\nB",
        "A\nor B",
        "A\nor\nB",
        "I think Paris or B",
    ],
)
@pytest.mark.parametrize("around", ["{}", "{}.", "<answer>{}</answer>", "\\boxed{{\\text{{{}}}}}"])
def test_words_around_alternatives_state_none_of_them(hedge: str, around: str) -> None:
    reply = around.format(hedge)
    assert stated(reply) == ""
    assert [rewarded(Choice, played(reply, answer=gold)) for gold in ("A", "B", "AB")] == [0.0] * 3


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("Both A and B", "AB"),
        ("<answer>Both A and B</answer>", "AB"),
        ("\\boxed{\\text{Both A and B}}", "AB"),
        ("both C and D", "CD"),
        ("I think both C and D fit", "CD"),
        ("A/B probably", "AB"),
        ("A & B maybe", "AB"),
        ("A, B, hard to say", "AB"),
        ("A as well as B", "AB"),
    ],
)
def test_words_around_joined_choices_state_all_of_them(reply: str, right: str) -> None:
    assert stated(reply) == right
    assert [rewarded(Choice, played(reply, answer=gold)) for gold in (right[0], right[1], right)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("B? No, A.", "A"),
        ("B? No. A.", "A"),
        ("B... no, A", "A"),
        ("B, wait, A", "A"),
        ("B. Actually, A", "A"),
        ("The answer is B. No, A.", "A"),
        ("A? No.", ""),
        ("B. No doubt.", "B"),
        ("Between A and B, I'd say B", "B"),
    ],
)
def test_a_choice_may_be_taken_back(reply: str, right: str) -> None:
    assert stated(reply) == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [("A dog is in B", "B"), ("B, I think", "B"), ("I think B, I guess", "B"), ("Unlike A, B is it", "B")],
)
def test_articles_and_pronouns_beside_a_choice(reply: str, right: str) -> None:
    assert stated(reply) == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("It is Paris.", "B"),
        ("Paris is correct", "B"),
        ("Paris is the answer", "B"),
        ("My choice is Paris", "B"),
        ("The capital of France is Paris.", "B"),
        ("Rome is old. I say **Paris**.", "B"),
        ("Paris, not Rome", "B"),
        ("Not Rome but Paris", "B"),
        ("It's not Rome, it's Paris", "B"),
        ("Paris rather than Rome", "B"),
        ("I'm not sure, Paris", "B"),
        ("I think A, Paris", "A"),
        ("It is St. Petersburg.", "D"),
        ("It lies in New York today", "E"),
        ("It lies in York today", "F"),
        ("I say Paris. Rome is old", "A"),
        ("Paris or Rome", ""),
        ("It is Paris and Rome", ""),
        ("Either Paris or A", ""),
        ("It is not Paris", ""),
        ("I don't think it is Paris.", ""),
        ("It can't be Paris", ""),
        ("Paris is wrong", ""),
        ("Paris isn't it", ""),
        ("A Parisian said so", ""),
        ("The capital is Lima", ""),
    ],
)
def test_the_text_of_a_choice_within_the_last_sentence(reply: str, right: str) -> None:
    texts = ("Rome", "Paris", "Berlin", "St. Petersburg", "New York", "York")
    assert stated(reply, texts, "ABCDEF") == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("A and C", "AC"),
        ("A, C", "AC"),
        ("a, c", "AC"),
        ("AC", "AC"),
        ("A C", "AC"),
        ("A;C", "AC"),
        ("A/C", "AC"),
        ("A & C", "AC"),
        ("A+C", "AC"),
        ("(A)(C)", "AC"),
        ("(A), (C)", "AC"),
        ("A、C", "AC"),
        ("A和C", "AC"),
        ("答案：A、C", "AC"),
        ("答案为 AC", "AC"),
        ("The answers are A and C", "AC"),
        ("The correct options are A, B, and D.", "ABD"),
        ("Both A and C are correct", "AC"),
        ("\\boxed{A, C}", "AC"),
        ("\\boxed{AC}", "AC"),
        ("\\boxed{\\{A, C\\}}", "AC"),
        ("\\boxed{A} and \\boxed{C}", "AC"),
        ("\\boxed{A}\n\\boxed{C}", "AC"),
        ("<answer>A and C</answer>", "AC"),
        ("<answer>A</answer><answer>C</answer>", "AC"),
        ("A. London and C. Rome", "AC"),
        ("A. London C. Rome", "AC"),
        ("A. London\nC. Rome", "AC"),
        ("A\nC", "AC"),
    ],
)
def test_several_choices_are_all_stated(reply: str, right: str) -> None:
    assert stated(reply) == right
    assert rewarded(Choice, played(reply, answer=list(right))) == 1.0
    assert rewarded(Choice, played(reply, answer=right[0])) == 0.0
    assert rewarded(Choice, played(right[0], answer=list(right))) == 0.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("Paris", "B"),
        ("paris.", "B"),
        ("**Paris**", "B"),
        ("The answer is Paris", "B"),
        ("The correct answer is Paris. It is old.", "B"),
        ("Answer: Paris", "B"),
        ("<answer>Paris</answer>", "B"),
        ("\\boxed{\\text{Paris}}", "B"),
        ("B Paris", "B"),
        ("b) paris", "B"),
        ("B. London", ""),
        ("London or Paris", ""),
        ("The answer is not Paris", ""),
        ("The capital of France is Paris", "B"),
        ("Madrid", ""),
        ("E", "E"),
    ],
)
def test_texts_of_the_choices(reply: str, right: str) -> None:
    assert stated(reply, tuple(CITIES), "ABCD") == right


@pytest.mark.parametrize(
    ("reply", "right"),
    [("a dog", "A"), ("A dog", "A"), ("The answer is a dog", "A"), ("I think a dog", "A"), ("a", "A"), ("a cat", "B")],
)
def test_a_text_may_begin_with_an_article(reply: str, right: str) -> None:
    assert stated(reply, ("a dog", "a cat", "a cow"), "ABC") == right


def test_a_text_that_two_choices_have_states_nothing() -> None:
    assert (
        stated("same", ("same", "same", "other"), "ABC") == ""
        and stated("other", ("same", "same", "other"), "ABC") == "C"
    )


def test_texts_may_speak_of_choices() -> None:
    texts = ("London", "Paris", "A or B", "Both A and B")
    assert stated("C. A or B", texts, "ABCD") == "C"
    assert stated("D. Both A and B", texts, "ABCD") == "D"
    assert stated("C. A or B") == "C"


@pytest.mark.parametrize(
    ("answer", "settings", "metadata"),
    [
        ("B", {}, {}),
        ("b", {}, {}),
        ("(B)", {}, {}),
        ("B. Paris", {}, {}),
        ("\\boxed{B}", {}, {}),
        (["B"], {}, {}),
        (1, {"index_base": 0}, {}),
        (2, {"index_base": 1}, {}),
        ("1", {"index_base": 0}, {}),
        ("Paris", {}, {"choices": CITIES}),
        ("paris", {}, {"choices": {"A": "London", "B": "Paris"}}),
        ("Paris", {}, {"choices": {"label": ["A", "B"], "text": ["London", "Paris"]}}),
        ("Paris", {"choices_key": "options"}, {"options": CITIES}),
        ("B", {}, {"choices": []}),
        ("B", {}, {"choices": None}),
    ],
)
def test_spellings_of_an_answer(answer: Any, settings: dict[str, Any], metadata: dict[str, Any]) -> None:
    assert rewarded(Choice, played("B", answer=answer, metadata=metadata), **settings) == 1.0
    assert rewarded(Choice, played("A", answer=answer, metadata=metadata), **settings) == 0.0


@pytest.mark.parametrize("answer", [["A", "C"], ["C", "A"], ["A", "C", "A"], "AC", "A,C", "A, C", "A and C", [0, 2]])
def test_an_answer_of_several_choices_needs_all_in_any_order(answer: Any) -> None:
    settings = {"index_base": 0} if answer == [0, 2] else {}
    got = {
        r: rewarded(Choice, played(r, answer=answer), **settings)
        for r in ("A, C", "C, A", "CA", "A", "A, B, C", "A or C")
    }
    assert got == {"A, C": 1.0, "C, A": 1.0, "CA": 1.0, "A": 0.0, "A, B, C": 0.0, "A or C": 0.0}


@pytest.mark.parametrize(
    ("answer", "settings", "metadata"),
    [
        ("E", {}, {"choices": CITIES}),
        ("E", {"count": 4}, {}),
        ("Z", {}, {}),
        ("Madrid", {}, {"choices": CITIES}),
        ("bad", {}, {}),
        ("", {}, {}),
        ([], {}, {}),
        ("A or B", {}, {}),
        (1, {}, {}),
        (4, {"index_base": 0}, {"choices": CITIES}),
        (0, {"index_base": 1}, {}),
        (-1, {"index_base": 0}, {}),
        (True, {"index_base": 0}, {}),
        (1.0, {"index_base": 0}, {}),
    ],
)
def test_an_answer_that_is_no_choice_is_an_error_of_the_row(
    answer: Any, settings: dict[str, Any], metadata: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"task 't': the answer .* cannot be read; allowed: a choice from A to [DJ]"):
        rewarded(Choice, played("B", answer=answer, metadata=metadata), **settings)


@pytest.mark.parametrize(
    ("choices", "said"), [("ABCD", "no list of texts"), ([["a"]], "no list of"), (["one"], "are 1; 2 to 26")]
)
def test_metadata_that_are_no_choices_are_an_error_of_the_row(choices: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"task 't': the metadata's 'choices' .*{said}"):
        rewarded(Choice, played("B", answer="B", metadata={"choices": choices}))


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("2", 1.0),
        ("(2)", 1.0),
        ("2.", 1.0),
        ("2. Paris", 1.0),
        ("Option 2", 1.0),
        ("The answer is 2", 1.0),
        ("答案：2", 1.0),
        ("\\boxed{2}", 1.0),
        ("The answer is 2.5", 0.0),
        ("The answer is 2 apples", 0.0),
        ("2 or 3", 0.0),
        ("2, 3", 0.0),
        ("I have 2 dogs", 0.0),
        ("12", 0.0),
    ],
)
def test_choices_may_have_numbers(reply: str, right: float) -> None:
    for answer in ("2", 2, "Paris"):
        found = played(reply, answer=answer, metadata={"choices": CITIES})
        assert rewarded(Choice, found, labels="digits") == right


def test_a_letter_beyond_the_choices_is_wrong() -> None:
    for reply in ("E", "The answer is E", "The answer is B. No, the answer is E."):
        assert rewarded(Choice, played(reply, answer="B", metadata={"choices": CITIES})) == 0.0
    assert rewarded(Choice, played("Z", answer="Z"), count=26) == 1.0


def test_it_abstains_without_an_answer_and_for_failed_plays() -> None:
    assert rewarded(Choice, played("B")) is None
    assert rewarded(Choice, played("B", answer="B", failed=True)) is None


@pytest.mark.parametrize(
    "piece",
    [
        "A ",
        "A\n",
        "A, ",
        "A or ",
        "answer is ",
        "it is the ",
        "so ",
        "(",
        "选",
        "答案",
        "*",
        "\\boxed{",
        "\\boxed{A} ",
        "\\text{",
        "\n",
        "Either A or ",
        "B? No, ",
        "or\n",
        "Paris. ",
        "not ",
    ],
)
def test_a_hundred_thousand_characters_are_read_at_once(piece: str) -> None:
    started = time.process_time()
    for end in ("\nThe answer is B", ""):
        stated(piece * (100_000 // len(piece)) + end, tuple(CITIES), "ABCD")
    assert time.process_time() - started < 2
