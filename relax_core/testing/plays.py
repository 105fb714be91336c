"""Played groups and their rows, made of nothing but a seed, for tests of what records them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.interfaces import Row
from relax_core.journal import JournalEntry, RecordedCut
from relax_core.keys import generator
from relax_core.types import Decoded, Group, Image, MediaRef, Sample, Stop, Task, Trajectory, Turn, message, user

if TYPE_CHECKING:
    import numpy as np


def picture(seed: int, size: int = 4) -> Decoded:
    """A small random image."""
    return Decoded("image", generator(seed, "picture").integers(0, 256, (size, size, 3)).astype("uint8"))


def played_group(number: int, members: int = 4, tokens: int = 12, picture_of: int | None = None) -> Group:
    """One group; every trajectory has one turn and one sample, about half of whose tokens are sampled."""
    rng = generator(number, "played")
    asked = user(Image(picture(picture_of)), "which colour?") if picture_of is not None else user(f"what is {number}?")
    task = Task(f"toy/{number}#0", (asked,), answer=str(number), metadata={"number": number}, environment="toy")
    group = Group(f"{task.id}@0", number, task, 0)
    for member in range(members):
        sample = _sample(rng, tokens, number, picture_of)
        reply = message("assistant", f"réponse {member}")
        turn = Turn(task.messages, reply, Stop.EOS, sample.sampled)
        group.trajectories.append(Trajectory(task, 0, member, [turn], [sample], Stop.EOS))
        score = float(rng.integers(0, 2))
        group.trajectories[-1].rewards = {"exact": score, "format": None}
        group.trajectories[-1].reward = group.trajectories[-1].raw_reward = score
    return group


def _sample(rng: np.random.Generator, tokens: int, version: int, picture_of: int | None) -> Sample:
    import numpy as np

    prompt = tokens // 2
    logprobs = rng.standard_normal(tokens - prompt).astype(np.float32).tolist()
    media = () if picture_of is None else (MediaRef("image", f"{picture(picture_of).hash}-image-toy", 1, 2),)
    return Sample(
        ids=rng.integers(0, 100, tokens).tolist(),
        mask=[0] * prompt + [1] * (tokens - prompt),
        logprobs=[0.0] * prompt + logprobs,
        versions=[-1] * prompt + [version] * (tokens - prompt),
        media=media,
        positions=None if picture_of is None else np.tile(np.arange(tokens, dtype=np.int32), (3, 1)),
    )


def rows_of_groups(groups: Sequence[Group]) -> list[Row]:
    """Every sample as a row that is ready to train."""
    import numpy as np

    rows = []
    for group in groups:
        for t in group.trajectories:
            for i, sample in enumerate(t.samples):
                advantages = generator(group.serial, "advantage", t.member, i).standard_normal(len(sample.ids))
                columns = {
                    "tokens": np.asarray(sample.ids, np.int32),
                    "mask": np.asarray(sample.mask, np.int8),
                    "logprobs": np.asarray(sample.logprobs, np.float32),
                    "versions": np.asarray(sample.versions, np.int32),
                    "positions": sample.positions,
                    "media": sample.media,
                    "trajectory": t,
                    "group": group,
                    "reward": t.reward,
                    "advantages": advantages.astype(np.float32),
                    "weight": 1.0,
                    "units": float(sample.sampled),
                }
                rows.append(Row(f"{group.id}/{t.member}/{i}", group.id, columns))
    return rows


def journal_entry(step: int, groups: Sequence[Group]) -> JournalEntry:
    """The entry of a step that trained these groups in two micro-batches."""
    rows = rows_of_groups(groups)
    ids = tuple(row.id for row in rows)
    half = len(ids) // 2
    cuts = (RecordedCut(ids[:half], False), RecordedCut(ids[half:], True))
    return JournalEntry(step, groups, rows, cuts, 1, {"loss": 0.1 + step, "grad_norm": 1 / 3})
