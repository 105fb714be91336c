"""Judges that see and hear: a tiny omni-modal model with frozen weights reads images, sounds and videos of plays."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.config.resolve import resolve
from relax_core.run import Run
from relax_core.scoring import Scorer
from relax_core.testing.reward_plays import group_of
from relax_core.testing.runs import TEXT_RUN
from relax_core.types import (
    Audio,
    Decoded,
    Image,
    Message,
    Part,
    Stop,
    Task,
    Text,
    ToolResult,
    Trajectory,
    Turn,
    Video,
    message,
    user,
)
from relax_plugin_genrm.judges import EngineJudge
from relax_plugin_genrm.reward import GenRM

pytestmark = pytest.mark.timeout(110)

OMNI = {"id": "qwen3-omni", "tiny": {"words": ["0", "1", "2", "3", "4", "5"], "unknown_words": "keep"}}
JUDGE = {
    "id": "genrm",
    "placement": "own",
    "model": OMNI,
    "scale": [0, 5],
    "votes": 4,
    "temperature": 1.0,
    "max_new_tokens": 2,
    "min_read": 0.01,
}


def picture(value: int) -> Image:
    return Image(Decoded("image", np.full((32, 32, 3), value, np.uint8)))


def sound(hertz: float) -> Audio:
    return Audio(Decoded("audio", np.sin(np.arange(8000) / 16000 * 2 * np.pi * hertz).astype(np.float32), 16000.0))


def clip(value: int) -> Video:
    return Video(Decoded("video", np.full((4, 32, 32, 3), value, np.uint8), 2.0))


def play(member: int, *shown: Part) -> Trajectory:
    prompt = (user("what ?", *shown),)
    return Trajectory(Task("t", prompt), 0, member, [Turn(prompt, message("assistant", "red"), Stop.EOS, 1)])


def scored(*plays: Trajectory, **settings: Any) -> tuple[int, Scorer]:
    """How many prompts the judge's engine read for plays that are scored twice."""

    async def main() -> tuple[int, Scorer]:
        raw = copy.deepcopy(TEXT_RUN) | {"plugins": ["omni", "genrm"], "rewards": [{**JUDGE, **settings}]}
        config, stack = resolve(raw)
        run = Run(config, Path("nowhere"), stack)
        scorer = Scorer.of(run, lambda line: None)
        await scorer.begin(run, None)
        try:
            for _ in range(2):
                await scorer.score(group_of(plays))
            reward = scorer.rewards[0][1]
            assert isinstance(reward, GenRM) and isinstance(reward._judge, EngineJudge)
            store = reward._judge.asker.adapter.media
            assert not any(entry.references for entry in store._entries.values())  # nothing is held behind a judgement
            return int((await reward._judge.asker.engine.health())["read_prompts"]), scorer
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(main(), 100))


def test_images_sounds_and_videos_are_judged_and_told_apart() -> None:
    kinds: list[Part] = [picture(10), picture(200), sound(440), sound(880), clip(10), clip(200)]
    plays = [play(i, medium) for i, medium in enumerate([*kinds, picture(10)])]
    read, scorer = scored(*plays)
    assert read == len(kinds), scorer.last_failure  # equal prompts once
    for one in plays:
        assert one.metrics["genrm/unread/failed"] == 0 == one.metrics["genrm/unread/late"], scorer.last_failure
        assert one.metrics["genrm/cached"] == 1.0


def test_what_tools_returned_is_judged_with_the_whole_conversation() -> None:
    def zoomed(value: int) -> Trajectory:
        prompt = (user("what ?", picture(10)),)
        result = Message("tool", (ToolResult((Text("here"), picture(value), sound(300))),))
        turns = [
            Turn(prompt, message("assistant", "look"), Stop.EOS, 1),
            Turn((result,), message("assistant", "red"), Stop.EOS, 1, after=0),
        ]
        return Trajectory(Task("t", prompt), 0, value, turns)

    plays = [zoomed(1), zoomed(2)]
    read, scorer = scored(*plays, show="conversation")
    assert read == 2 and all(one.metrics["genrm/unread/failed"] == 0 for one in plays), scorer.last_failure
    assert scored(*plays, show="last")[0] == 1  # the last reply is the same


def test_a_judge_that_reads_no_media_says_so() -> None:
    words = {"id": "text", "tiny": {"words": ["0", "1"], "hidden": 32, "layers": 1, "unknown_words": "keep"}}
    (blind,) = plays = [play(0, picture(1))]
    _, scorer = scored(*plays, model=words)
    assert blind.metrics["genrm/unread/failed"] == 1.0 and "image" in scorer.last_failure["genrm"]
    _, scorer = scored(*plays, model=words, media=False)
    assert blind.metrics["genrm/unread/failed"] == 0.0
