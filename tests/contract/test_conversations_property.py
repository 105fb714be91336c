"""Random conversations through real chat templates: what is trained is what was sampled, all else the template's own.

Replies are given, so no weights are needed; chat, adapters, templates and tokenizers are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing import dialogues
from relax_core.testing.conversation_strategies import SECRET, Exchange, conversations
from relax_core.testing.conversations import Told
from relax_core.testing.tokenizers import RELEASED, released

WRITTEN = {
    "chatml": dialogues.CHATML,
    "own system": dialogues.OWN_SYSTEM,
    "first user": dialogues.NEEDS_USER,
    "like llama 3": dialogues.LLAMA3,
    "like gemma": dialogues.GEMMA,
    "like qwen 3": dialogues.QWEN3,
    "opens thinking": dialogues.OPENS_THINKING,
}
FAST = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[p for p in Phase if p is not Phase.explain],
)
WIDE = settings(FAST, max_examples=1500)

Adapters = Callable[[str], TextAdapter]
Branches = list[tuple[int, Exchange]]
TALKS = {
    "talk": conversations(),
    "branches": st.lists(st.tuples(st.integers(0, 3), conversations().map(lambda c: c[-1])), max_size=2),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """By the name of a released tokenizer, or of a template in WRITTEN."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(name: str) -> TextAdapter:
        if name in RELEASED:
            return TextAdapter(TextConfig(path=released(name, folder)), MediaStore({}, 0))
        template = folder / f"{name}.jinja"
        template.write_text(WRITTEN[name])
        own = folder / "own"
        config = TextConfig(path=own if own.exists() else dialogues.model_folder(own), chat_template=template)
        return TextAdapter(config, MediaStore({}, 0))

    return made


def play(adapter: TextAdapter, talk: list[Exchange], branches: Branches) -> Told:
    """Every turn is checked as it is played; then others branch off, and the first conversation goes on."""
    told = Told(adapter, SECRET)
    for exchange in talk:
        told.say(*exchange.new, reply=exchange.answer.drawn(adapter, told.ids, SECRET))
    for turns, exchange in branches:
        other = told.branch(min(turns, len(told.rows)))
        for one in (other, told):
            one.say(*exchange.new, reply=exchange.answer.drawn(adapter, told.ids, SECRET))
    return told


@pytest.mark.parametrize("name", [*RELEASED, *WRITTEN])
@FAST
@given(**TALKS)
def test_any_conversation(adapters: Adapters, name: str, talk: list[Exchange], branches: Branches) -> None:
    play(adapters(name), talk, branches)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELEASED, *WRITTEN])
@WIDE
@given(**TALKS)
def test_very_many_conversations(adapters: Adapters, name: str, talk: list[Exchange], branches: Branches) -> None:
    play(adapters(name), talk, branches)
