"""What the deep check says of a chat template: which turns extend a sample, which start a new one, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from relax_core.check_template import template_lines
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing import dialogues
from relax_core.testing.tokenizers import released
from relax_core.types import Task, system, user

TASK = Task("t", (user("what is 3 + 4"),), answer="7")
ANSWER, CALL, CALLS = "user after answer", "tool result after call", "two tool results after two calls"
THOUGHT, THOUGHT_CALL = "user after reasoning", "tool result after reasoning and call"
ALL = [ANSWER, CALL, CALLS, THOUGHT, THOUGHT_CALL]
NOT_KEPT = "reasoning in earlier replies is not kept as it was sampled: the template changes "


def said(adapter: TextAdapter, task: Task = TASK) -> dict[str, tuple[list[str], str]]:
    """Kinds of turn and the reason, by what happens at them; there is one line for each here."""
    found: dict[str, tuple[list[str], str]] = {}
    for line in template_lines(adapter, task):
        assert "\n" not in line and line.startswith("template: ")
        _, what, kinds, *why = line.split(": ", 3)
        assert what not in found
        found[what] = (kinds.split(", "), "".join(why))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dialogues.model_folder(tmp_path_factory.mktemp("model"))


def written(folder: Path, source: str) -> TextAdapter:
    template = folder / "used.jinja"
    template.write_text(source)
    return TextAdapter(TextConfig(path=folder, chat_template=template), MediaStore({}, 0))


@pytest.mark.parametrize("source", [dialogues.CHATML, dialogues.OWN_SYSTEM, dialogues.NEEDS_USER, dialogues.LLAMA3])
def test_templates_that_keep_the_past(folder: Path, source: str) -> None:
    assert said(written(folder, source)) == {"same sample": (ALL, "")}


def test_a_template_that_removes_reasoning_when_the_user_speaks(folder: Path) -> None:
    found = said(written(folder, dialogues.QWEN3))
    assert found["same sample"] == ([ANSWER, CALL, CALLS, THOUGHT_CALL], "")
    kinds, why = found["new sample"]
    assert kinds == [THOUGHT] and why.startswith(NOT_KEPT + "the last reply when messages follow: ")
    assert r"'assistant\n<think>\n7\n</think>" in why and "becomes" in why


def test_a_template_that_opens_the_reasoning_itself(folder: Path) -> None:
    """Replies close it then; what it opened goes with them when the user speaks, and when there was none."""
    found = said(written(folder, dialogues.OPENS_THINKING))
    assert found["same sample"] == ([THOUGHT_CALL], "")
    kinds, why = found["new sample"]
    assert kinds == [ANSWER, CALL, CALLS, THOUGHT] and why.startswith(NOT_KEPT + "what came before the last reply: ")


def test_a_template_that_refuses_tools(folder: Path) -> None:
    found = said(written(folder, dialogues.GEMMA))
    assert found["same sample"] == ([ANSWER, THOUGHT], "")
    kinds, why = found["refused"]
    assert kinds == [CALL, CALLS, THOUGHT_CALL] and why.endswith("(user, assistant, tool): roles must alternate")


def test_a_template_that_moves_the_system_message(folder: Path) -> None:
    """It stands before the last user's text, wherever that is."""
    moves = (
        "{%- set ns = namespace(last=0, s='') -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set ns.last = loop.index0 -%}{%- elif m.role == 'system' -%}{%- set ns.s = m.content -%}{%- endif -%}"
        "{%- endfor -%}{%- for m in messages -%}{%- if m.role != 'system' -%}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ (ns.s if loop.index0 == ns.last else '') + m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
        + dialogues.ASSISTANT
    )
    found = said(written(folder, moves), Task("t", (system("be"), *TASK.messages), answer="7"))
    assert found["same sample"][0] == [CALL, CALLS, THOUGHT_CALL]
    kinds, why = found["new sample"]
    assert kinds == [ANSWER, THOUGHT] and why.startswith("the template changes what came before the last reply: ")


KEPT = {"same sample": ALL}
RELEASED: Mapping[str, Mapping[str, list[str]]] = {
    "qwen3": {"same sample": [ANSWER, CALL, CALLS, THOUGHT_CALL], "new sample": [THOUGHT]},
    "llama3.1": KEPT,
    "gemma3": {"same sample": [ANSWER, THOUGHT], "refused": [CALL, CALLS, THOUGHT_CALL]},
    "deepseek-v3": KEPT,
}


@pytest.mark.parametrize(("name", "wanted"), RELEASED.items(), ids=RELEASED)
def test_released_templates(tmp_path: Path, name: str, wanted: Mapping[str, list[str]]) -> None:
    adapter = TextAdapter(TextConfig(path=released(name, tmp_path)), MediaStore({}, 0))
    found = said(adapter)
    assert {what: kinds for what, (kinds, _) in found.items()} == wanted
    for what, (_, why) in found.items():
        reason = {"same sample": "", "new sample": NOT_KEPT, "refused": "the chat template refuses these messages"}[
            what
        ]
        assert why.startswith(reason)


def test_a_model_that_never_ends_a_reply_is_looked_at_too(folder: Path) -> None:
    file = folder / "endless.jinja"
    file.write_text(dialogues.CHATML)
    adapter = TextAdapter(TextConfig(path=folder, chat_template=file), MediaStore({}, 0))
    adapter.stop_ids = frozenset()
    assert any("same sample" in line for line in template_lines(adapter, TASK))
