"""Random conversations through real chat templates: what is trained is what was sampled, all else the template's own.

Replies are given, so no weights are needed; chat, adapters, templates and tokenizers are the real ones.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.testing.conversation_strategies import SECRET, Exchange, conversations
from relax_core.testing.conversations import Told
from relax_core.testing.tokenizers import RELEASED, released

PROFILE = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
WIDE = settings(PROFILE, max_examples=2000)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("released")
    return cache(lambda name: TextAdapter(TextConfig(path=released(name, folder)), MediaStore({}, 0)))


def play(adapter: TextAdapter, talk: list[Exchange]) -> Told:
    told = Told(adapter, SECRET)
    for exchange in talk:
        told.say(*exchange.new, reply=exchange.answer.drawn(adapter, told.ids, SECRET))
    return told


@pytest.mark.parametrize("name", RELEASED)
@PROFILE
@given(talk=conversations())
def test_released_templates(adapters, name: str, talk: list[Exchange]) -> None:
    play(adapters(name), talk)
