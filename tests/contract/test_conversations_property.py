"""Random conversations through real chat templates: what is trained is what was sampled, all else the template's own.

Replies are given, so no weights are needed; chat, adapters, templates and tokenizers are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given

from relax_core.media import MediaStore
from relax_core.models.config import Option, TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing import dialogues
from relax_core.testing.conversation_strategies import Talk, profile, talks
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
NAMES = [*RELEASED, "qwen3, without thinking", *WRITTEN]

Adapters = Callable[[str], TextAdapter]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """By the name of a released tokenizer, or of a template in WRITTEN."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(name: str) -> TextAdapter:
        name, _, option = name.partition(", ")
        if name in RELEASED:
            options: dict[str, Option] = {"enable_thinking": False} if option else {}
            config = TextConfig(path=released(name, folder), template_options=options)
            return TextAdapter(config, MediaStore({}, 0))
        template = folder / f"{name}.jinja"
        template.write_text(WRITTEN[name])
        own = folder / "own"
        config = TextConfig(path=own if own.exists() else dialogues.model_folder(own), chat_template=template)
        return TextAdapter(config, MediaStore({}, 0))

    return made


@pytest.mark.parametrize("name", NAMES)
@profile(30)
@given(talk=talks())
def test_any_conversation(adapters: Adapters, name: str, talk: Talk) -> None:
    talk.play(adapters(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@profile(1500)
@given(talk=talks())
def test_very_many_conversations(adapters: Adapters, name: str, talk: Talk) -> None:
    talk.play(adapters(name))
