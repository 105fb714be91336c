"""Conversations that made other frameworks train wrong tokens, through templates like those of released models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.errors import DataError
from relax_core.players import rows_of
from relax_core.testing import dialogues
from relax_core.testing.dialogues import (
    CHATML,
    EOT,
    GEMMA,
    IM_END,
    LLAMA3,
    NEEDS_SYSTEM,
    NEEDS_USER,
    OPENS_THINKING,
    OWN_SYSTEM,
    QWEN3,
    TURN_END,
    Table,
)
from relax_core.types import (
    Group,
    Message,
    Role,
    Stop,
    Task,
    Text,
    ToolCall,
    ToolResult,
    Trajectory,
    message,
    system,
    user,
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dialogues.model_folder(tmp_path_factory.mktemp("model"))


def trained_tokens(table: Table) -> list[int]:
    """By row that a rollout puts on the bus."""
    task, chat = Task("t", (user("what"),)), table.chat
    rows = rows_of(Group("g", 0, task, 0, [Trajectory(task, 0, 0, chat.turns, chat.samples, Stop.EOS)]))
    return [int(columns["mask"].sum()) for columns in rows.values()]


def tool(text: str) -> Message:
    return Message("tool", (ToolResult((Text(text),)),))


KEPT: dict[str, tuple[str, str, tuple[Role, ...]]] = {
    "chatml, tool": (CHATML, IM_END, ("system", "user", "tool", "tool")),
    "chatml, user": (CHATML, IM_END, ("user", "user", "user")),
    "first system": (NEEDS_SYSTEM, IM_END, ("system", "user", "tool")),
    "first user": (NEEDS_USER, IM_END, ("user", "tool", "user")),
    "own system": (OWN_SYSTEM, IM_END, ("user", "tool", "user")),
    "llama 3": (LLAMA3, EOT, ("system", "user", "tool", "user")),
    "gemma": (GEMMA, TURN_END, ("system", "user", "user", "user")),
    "qwen 3, tool": (QWEN3, IM_END, ("system", "user", "tool", "tool")),
    "qwen 3, user": (QWEN3, IM_END, ("user", "user")),
}
"""Template, its end of turn, and who speaks: the policy answers each of them but the system."""


# --- what is observed and what is trained -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_ids_are_the_templates_own_and_only_replies_are_trained(
    model_folder: Path, case: tuple[str, str, tuple[Role, ...]]
) -> None:
    """So the header of the assistant, and what the template puts behind an end of turn, are observations."""
    source, end, roles = case
    table, said, waiting = Table(model_folder, source, end), list[tuple[Role, str]](), list[Message]()
    for number, role in enumerate(roles):
        text = f"the weather in Paris {number}"
        said.append((role, text))
        waiting.append(tool(text) if role == "tool" else message(role, text))
        if role == "system":
            continue
        prompt = table.whole(*said)
        assert table.say(*waiting, reply=f"it is {number} .") == f"it is {number} ."
        assert table.sample.ids == prompt + table.ids(f"it is {number} .") + table.end
        said.append(("assistant", f"it is {number} ."))
        waiting = []
    replies = [text for role, text in said if role == "assistant"]
    assert table.trained(table.sample) == "".join(reply + end for reply in replies)
    assert {v for v, m in zip(table.sample.versions, table.sample.mask, strict=True) if m} == {3}


def test_the_newline_behind_an_end_of_turn_is_an_observation(model_folder: Path) -> None:
    table = Table(model_folder, CHATML)
    table.say(user("what"), reply="get weather")
    sampled = len(table.sample.ids)
    table.say(tool("sunny"), reply="sunny")
    observed = table.sample.ids[sampled : len(table.sample.ids) - 2 - 1]
    newline = table.ids("\n")
    assert observed[: len(newline)] == newline and table.text(observed).startswith("\n<|im_start|>tool\nsunny")
    assert table.sample.mask[sampled : sampled + len(observed)] == [0] * len(observed)
    assert table.sample.logprobs[sampled : sampled + len(observed)] == [0.0] * len(observed)


@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_tokens_stay_as_they_were_sampled_even_if_the_tokenizer_would_never_cut_them_so(
    model_folder: Path, case: tuple[str, str, tuple[Role, ...]]
) -> None:
    source, end, roles = case
    table = Table(model_folder, source, end)
    letters = [i for letter in "hello" for i in table.ids(letter)]
    assert letters != table.ids("hello")
    opening = [message("system", "be"), user("what")] if roles[0] == "system" else [user("what")]
    assert table.say(*opening, reply=letters) == "hello"
    first = list(table.sample.ids)
    follow = tool("sunny") if "tool" in roles else user("sunny")
    table.say(follow, reply="7")
    assert table.sample.ids[: len(first)] == first and first[-6:-1] == letters
    assert table.trained(table.sample) == f"hello{end}7{end}"


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_that_the_template_removes_starts_a_new_sample_and_both_are_trained(model_folder: Path) -> None:
    table = Table(model_folder, QWEN3)
    thought = "<think>\n3 + 4\n</think>\n\nThe answer is 7 ."
    table.say(user("what is 3 + 4"), reply=thought)
    before = list(table.chat.samples[0].ids)
    table.say(user("how"), reply="hello")
    first, second = table.chat.samples
    assert first.ids == before == table.whole(("user", "what is 3 + 4")) + table.ids(thought) + table.end
    past: list[tuple[Role, str]] = [("user", "what is 3 + 4"), ("assistant", "The answer is 7 ."), ("user", "how")]
    assert second.ids == table.whole(*past) + table.ids("hello") + table.end
    assert "3 + 4" not in table.text(second.ids).split("The answer")[1]
    assert [table.trained(s) for s in (first, second)] == [thought + IM_END, "hello" + IM_END]
    assert len(table.chat.rewrites) == 1 and "think" in table.chat.rewrites[0]
    assert trained_tokens(table) == [sum(first.mask), sum(second.mask)]


def test_thinking_is_kept_while_tools_answer_and_goes_when_the_user_speaks_again(model_folder: Path) -> None:
    """Two turns with thinking in the first sample; all of it is trained."""
    table = Table(model_folder, QWEN3)
    call = '<think>\nweather\n</think>\n\n<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
    table.say(user("what is the weather in Paris"), reply=call)
    table.say(tool("sunny"), reply="<think>\nsunny\n</think>\n\nIt is sunny .")
    assert len(table.chat.samples) == 1 and table.chat.rewrites == []
    table.say(user("how"), reply="hello")
    first, second = table.chat.samples
    assert table.trained(first) == f"{call}{IM_END}<think>\nsunny\n</think>\n\nIt is sunny .{IM_END}"
    assert table.trained(second) == f"hello{IM_END}" and "<think>" not in table.text(second.ids)
    assert len(trained_tokens(table)) == 2


@pytest.mark.parametrize("reply", ["3 + 4\n</think>\n\nThe answer is 7 .", "3 + 4</think>The answer is 7 ."])
def test_a_reply_whose_thinking_the_template_opened_goes_on_or_starts_anew_but_is_never_lost(
    model_folder: Path, reply: str
) -> None:
    for follow, samples in ((tool("sunny"), 1), (user("how"), 2)):
        table = Table(model_folder, OPENS_THINKING)
        assert table.say(user("what is 3 + 4"), reply=reply) == reply
        assert table.text(table.sample.ids).endswith(f"<|im_start|>assistant\n<think>\n{reply}<|im_end|>")
        table.say(follow, reply="hello\n</think>\n\nhello")
        assert len(table.chat.samples) == samples
        trained = [table.trained(sample) for sample in table.chat.samples]
        assert "".join(trained) == f"{reply}{IM_END}hello\n</think>\n\nhello{IM_END}"


# --- templates that want a first turn ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "opening", "reason"),
    [
        (NEEDS_SYSTEM, [system("be"), user("what")], "system speaks first"),
        (NEEDS_USER, [user("what")], "user speaks first"),
    ],
)
def test_what_comes_later_is_tokenised_in_context_where_a_template_refuses_it_alone(
    model_folder: Path, source: str, opening: list[Message], reason: str
) -> None:
    table = Table(model_folder, source)
    with pytest.raises(DataError, match=reason):
        table.adapter.encode([tool("sunny")])
    table.say(*opening, reply="get")
    table.say(tool("sunny"), reply="sunny")
    table.say(tool("7"), reply="7")
    assert len(table.chat.samples) == 1


def test_a_template_with_a_system_message_of_its_own_writes_it_once(model_folder: Path) -> None:
    table = Table(model_folder, OWN_SYSTEM)
    table.say(user("what"), reply="get")
    table.say(tool("sunny"), reply="sunny")
    assert table.text(table.sample.ids).count("<|im_start|>system") == 1


def test_roles_that_a_template_refuses_are_an_error_that_leaves_what_was_sampled(model_folder: Path) -> None:
    table = Table(model_folder, GEMMA, TURN_END)
    table.say(user("what"), reply="get")
    before = list(table.sample.ids)
    with pytest.raises(
        DataError, match=r"refuses these messages \(user, assistant, user, user\): roles must alternate"
    ):
        table.say(user("a"), user("b"), reply="no")
    assert table.sample.ids == before


# --- other scripts ----------------------------------------------------------------------------------------------------

WORDS = ["北京的天气", "مرحبا بالعالم", "👩‍👩‍👧🎉", "Ünïcødé"]


@pytest.mark.parametrize("word", WORDS)
def test_letters_in_calls_and_results_cost_what_they_cost_in_plain_text(model_folder: Path, word: str) -> None:
    """The bytes of UTF-8 at most; written as escapes each would cost five tokens and more."""
    table = Table(model_folder, QWEN3)
    calls = Message("assistant", (ToolCall("get", {"city": word, word: [word]}, id="1"),))
    history = [user("what"), calls, tool(json.dumps({"found": word}, ensure_ascii=False))]
    text = table.text(table.adapter.encode(history).ids)
    assert text.count(word) == 4 and "\\u" not in text
    ascii_only = [user("what"), Message("assistant", (ToolCall("get", {"city": "", "": [""]}, id="1"),)), tool("")]
    grown = len(table.adapter.encode(history).ids) - len(table.adapter.encode(ascii_only).ids)
    assert grown <= 4 * len(word.encode()) + len(table.ids('{"found": ""}'))


@pytest.mark.parametrize("word", WORDS)
def test_sampled_letters_of_any_script_are_trained_as_sampled(model_folder: Path, word: str) -> None:
    table = Table(model_folder, QWEN3)
    call = f'<tool_call>\n{{"name": "get", "arguments": {{"city": "{word}"}}}}\n</tool_call>'
    assert table.say(user("what"), reply=call) == call
    table.say(tool(word), reply=word)
    assert table.trained(table.sample) == f"{call}{IM_END}{word}{IM_END}"
    assert table.text(table.sample.ids).count(word) == 3
