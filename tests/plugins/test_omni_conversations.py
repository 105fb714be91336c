"""Random conversations about pictures, sounds and films: every token where the template has it, in its own position.

Media come from the user and from tools, in any turn; replies are given (see tests/contract for text alone).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3OmniMoeThinkerConfig

from relax_core.media import MediaStore
from relax_core.testing import dialogues
from relax_core.testing.conversation_strategies import Talk, profile, talks
from relax_core.testing.noise import film, picture, sound
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.config import OmniConfig, TinyOmni
from relax_plugin_omni.testing import WORDS, tiny_omni
from relax_plugin_omni.tiny import SPECIAL, tiny_config

MEDIA: st.SearchStrategy[Any] = st.one_of(
    st.builds(picture, st.sampled_from((32, 64)), st.sampled_from((32, 96)), st.integers(0, 2)),
    st.builds(sound, st.sampled_from((200, 8000, 20000)), seed=st.integers(0, 2)),
    st.builds(film, st.sampled_from((1, 4, 5)), st.sampled_from((2.0, 1.0)), seed=st.integers(0, 2)),
)


Adapters = Callable[[str], OmniAdapter]


def written(folder: Path, source: str) -> OmniAdapter:
    """An adapter of a folder: the tokenizer of ``dialogues``, with media, and a chat template."""
    if not folder.exists():
        dialogues.model_folder(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
        tokenizer.save_pretrained(folder)
        thinker = tiny_config(TinyOmni(words=("user",)), tokenizer)
        Qwen3OmniMoeThinkerConfig(**thinker).save_pretrained(folder)
    template = folder / "used.jinja"
    template.write_text(dialogues.with_media(source))
    return OmniAdapter(OmniConfig(path=folder, chat_template=template), MediaStore({}, 10**9))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("omni")
    return cache(lambda name: written(folder / "model", getattr(dialogues, name)))


NAMES = ["CHATML", "QWEN3", "OPENS_THINKING"]


@pytest.mark.parametrize("name", NAMES)
@profile(30)
@given(talk=talks(media=MEDIA))
def test_any_conversation(adapters: Adapters, name: str, talk: Talk) -> None:
    talk.play(adapters(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@profile(1000)
@given(talk=talks(media=MEDIA))
def test_very_many_conversations(adapters: Adapters, name: str, talk: Talk) -> None:
    talk.play(adapters(name))


@pytest.fixture(scope="module")
def tiny() -> OmniAdapter:
    return tiny_omni((*WORDS, "secret"))


REFUSED = re.compile("too short|the chat template writes no tools")
SPOKEN = st.lists(st.sampled_from(WORDS).map(lambda word: f"{word} "), max_size=4).map("".join)


@profile(30)
@given(talk=talks(SPOKEN, MEDIA))
def test_any_conversation_of_the_tiny_model(tiny: OmniAdapter, talk: Talk) -> None:
    told = talk.play(tiny, " secret ")
    assert told.chat.rewrites == [] and all(REFUSED.search(line) for line in told.refused)
