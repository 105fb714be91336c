"""Checks that every environment must pass, whatever it is about. In a plugin's tests, all there is to write::

def test_mine() -> None:
    check_environment(Mine(Mine.Config()))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.testing import environment_plays as plays
from relax_core.testing import environment_tasks as data
from relax_core.testing.scripted_plays import Table

if TYPE_CHECKING:
    from relax_core.interfaces import Environment

TURNS = 50
"""Limit of a play in these checks, as a run file's ``limits`` may set one."""


def check_environment(
    environment: Environment,
    *,
    scripts: Sequence[Sequence[str]] = (),
    tasks: int = 3,
    looked_at: int = 200,
    seconds: float = 20.0,
    evaluation: bool = True,
) -> None:
    """Raise AssertionError, saying what is wrong, unless the environment keeps its promises.

    Tasks: well formed, media readable, ids unique, in a fixed order whoever asks, equal after pickling and in
    trajectory files, none in both splits. Plays, on ``tasks`` of them: whatever the policy says (nothing, garbage, any
    script, very much, broken and whole tool calls, the answer), a play ends without an error; it is the same again
    under the same key, beside other plays and in another instance; it draws by ``chat.random`` alone; and nothing is
    left at work when it has ended or was cancelled. ``close`` may be called twice.

    ``scripts``: replies in turn, of which the last is repeated, that lead through more of the environment.
    ``looked_at``: tasks of each split that are looked at, at most. ``seconds``: what a play may take.
    ``evaluation``: whether there is an eval split.
    """
    found = data.check_tasks(environment, looked_at, ("train", "eval") if evaluation else ("train",))
    table = Table(environment, TURNS)
    chosen = data.spread(found["train"], tasks)
    data.check_media(table.adapter, [*chosen, *data.spread(found.get("eval", ()), tasks)])
    script = [*plays.replies(chosen), *plays.named(scripts)]
    plays.check_any_reply(table, chosen, script, seconds)
    other = Table(plays.again(environment), TURNS)
    plays.check_again(table, other, chosen, script, seconds)
    plays.check_side_by_side(table, chosen, script, seconds)
    plays.check_cancelled(table, chosen, script, seconds)
    plays.check_closed(other, seconds)
