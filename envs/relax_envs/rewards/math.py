"""Reward ``math``: whether the reply's answer is mathematically the task's, decided in processes of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from relax_core.errors import ConfigError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Group, Trajectory
from relax_envs.graders.pool import Pool
from relax_envs.math.policy import LONGEST_REPLY, Boxes, Extract, Mixed, Order, Percent, Policy, Thousands, Units
from relax_envs.rewards.reply import abstains, final_part, unreadable

if TYPE_CHECKING:
    from relax_core.config.schema import RunConfig

GRADE = "relax_envs.math.grade:grade"
MISSING = "math needs the package math-verify, which is not installed: pip install 'relax-rl[math]'"
POLICY = tuple(Policy.__dataclass_fields__)


class Math(Reward):
    """1.0 if the answer of the last reply says what the task's answer says, or one of them where that is a list, else
    0.0. Abstains where the task has no answer, and where the play failed.

    **Where the answer is looked for**: in what comes after the reasoning (the last ``</think>``), and there in the
    last ``<answer>`` tags, if there are any. First come the boxes (``\\boxed{5}``, ``\\boxed 5``, ``\\fbox{5}``,
    ``\\framebox{5}``; ``boxes`` says which of several; one that is never closed holds no answer). Without any box, and
    unless ``extract`` is ``box``: what follows the last ``the answer is``, ``Answer:`` or ``####``; else the whole
    reply, if all of it is an answer; else its last formula (``$..$``, ``\\(..\\)``, ``\\[..\\]``); else its last line,
    if that is an answer; else its last number with the calculation around it. The first of these that can be read
    counts, right or wrong.

    **What is read**: numbers, fractions, mixed numbers, repeating decimals, powers, roots, factorials, binomials,
    logarithms, trigonometric and other functions, pi, e, i, infinity, variables, in LaTeX and as plain text (``pi/2``,
    ``sqrt(3)/2``), with the digits and signs of any script; percentages, units, sums of money, degrees; tuples, sets,
    lists, intervals and their unions, ratios, matrices, inequalities, equations, ``±``, numbers in other bases;
    letters of choices and words, without regard to case. Sums, integrals, limits and the like are left to math-verify.
    ``x = 5`` is 5, for another variable than the gold's it is wrong. ``1/2x`` is ``(1/2)x``, ``\\log`` has the base 10
    or e, whichever makes both sides agree.

    **How it is compared**: exactly: 0.333 is not 1/3, and 3.14 not pi, unless ``tolerance`` allows it. Fractions are
    compared as such, irrational numbers to so many digits that the smallest number in them is seen (60 to 4,000),
    expressions with variables at several points.

    **What is refused, and so wrong, before anything is evaluated**: an answer longer than ``longest`` or nested deeper
    than ``deepest``, numbers of more than 40,000 bits wherever they come up (``9**9**9**9``, ``99999!``), and anything
    that is not mathematics; no reply is ever run as code. A gold that is refused or cannot be read is a bad row: an
    error, counted, and the reward abstains. It does so, too, where a grader dies or overruns ``deadline``; the limits
    are such that no reply is known to bring that about.
    """

    class Config(ComponentConfig):
        extract: Extract = "anywhere"
        """``box``: only what stands in a box is an answer; ``anywhere``: as the reward's description says."""
        boxes: Boxes = "last"
        """Of several boxes: ``last`` or ``first`` counts; ``any``: one right one is enough; ``all_equal``: each must
        be right; ``list``: together they are the answer, as a list."""
        percent: Percent = "value"
        """``value``: 50% is 0.5, not 50; ``number``: it is 50, not 0.5; ``either``: both are right."""
        thousands: Thousands = "comma"
        """``comma``: 1,000 is a thousand; in brackets a comma separates, unless what follows could be no number:
        (1,234) is a pair, (1,000) a number. ``dot``: 1.000 is a thousand and 0,5 a half. ``indian``: 1,00,000 too.
        ``space``: a comma only separates. With all of these 1 000 and 1'000 are a thousand; with ``none`` they are
        not."""
        units: Units = "optional"
        """``optional``: a unit may be left out, but not be another one (500 cm is 5 m, 5 cm is not); ``require``: nor
        may it be left out where the gold has one; ``ignore``: units never matter. Names of things that are counted
        (apples) never do. 90° is 90, and pi/2."""
        order: Order = "kind"
        """``kind``: tuples have an order, sets and lists without brackets have none, and brackets matter: (1,2) is not
        (2,1), {1,2} is {2,1} but not (1,2), a list is any of these. ``strict``: lists have an order, too. ``free``:
        neither order nor brackets matter."""
        mixed: Mixed = "sum"
        """What ``1\\frac{1}{2}`` and ``1 1/2`` are: ``sum``: 3/2; ``product``: 1/2."""
        tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0
        """Relative to the gold's value: by how much an answer may differ where it or the gold has a decimal point."""
        longest: Annotated[int, Field(ge=1, le=10_000)] = 1000
        """Characters of an answer; a longer one is wrong."""
        deepest: Annotated[int, Field(ge=1, le=50)] = 30
        """Brackets of an answer that may stand in each other; a deeper one is wrong."""
        deadline: Annotated[float, Field(gt=0)] = 10.0
        """Seconds for one answer, after which its process is killed and the reward abstains."""
        workers: PositiveInt = 2
        """Processes that grade."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"rewards: {MISSING}")
        self._options = {name: getattr(config, name) for name in POLICY}
        self._pool = Pool([GRADE], workers=config.workers, deadline=config.deadline)

    @classmethod
    def check(cls, config: Any, run: RunConfig) -> Iterable[str]:
        if importlib.util.find_spec("math_verify") is None:
            yield MISSING

    async def __call__(self, trajectory: Trajectory) -> float | None:
        (found,) = await self._score([trajectory])
        if isinstance(found, BaseException):
            raise found
        return found

    async def score_group(self, group: Group) -> list[float | BaseException | None]:
        """All of a group in one batch."""
        return await self._score(group.trajectories)

    async def _score(self, trajectories: Sequence[Trajectory]) -> list[float | BaseException | None]:
        """Rewards in order; an error where there is none, None where there can be none."""
        scores: list[float | BaseException | None] = [None] * len(trajectories)
        calls: dict[int, list[Any]] = {}
        for i, trajectory in enumerate(trajectories):
            if abstains(trajectory):
                continue
            golds = _golds(trajectory.task.answer)
            if golds is None:
                scores[i] = unreadable(trajectory, trajectory.task.answer, "text, a number, or a list of these")
                continue
            calls[i] = [golds, final_part(trajectory.last_reply or "")[-LONGEST_REPLY:], self._options]
        for i, found in zip(calls, await self._pool.run_many(GRADE, list(calls.values())), strict=True):
            if isinstance(found, BaseException):
                scores[i] = found
            elif "reward" in found:
                scores[i] = found["reward"]
            else:
                allowed = f"mathematics that has a value, or words ({found['why']})"
                scores[i] = unreadable(trajectories[i], found["unreadable"], allowed)
        return scores


def _golds(answer: Any) -> list[str] | None:
    """The allowed answers as text; None for what is no answer."""
    golds = answer if isinstance(answer, list | tuple) else [answer]
    if not golds or not all(isinstance(gold, str | int | float) for gold in golds):
        return None
    return [str(gold) for gold in golds]
