"""Reward ``choice``: whether the reply chooses what is right in a multiple choice question."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from relax_core.errors import DataError
from relax_core.interfaces import ComponentConfig, Reward
from relax_core.types import Trajectory
from relax_envs.rewards.choice_reading import NOTHING, ChoiceReader, Stated
from relax_envs.rewards.reply import abstains, final_part, unreadable

LETTERS = 10
"""Choices, A to J, where their number is not known."""


class Choice(Reward):
    """1.0 if the choice that the reply states last is the answer, else 0.0.

    **What is read**: the reply after its reasoning (``</think>``); of that the last ``<answer>`` tags, else the last
    ``\\boxed{}``, else all of it. Markdown, LaTeX's text commands, case and full-width letters do not matter.

    **A stated choice** is, whichever comes last:

    - behind words that announce it: "the answer is B", "Answer: (b)", "I choose B", "so C", "故选B", "答案：B";
    - before words that confirm it: "B is correct", "Both A and C are right";
    - a line of its own: "B", "(B)", "B.", "B)", "B. Paris", "Option B", "B, because ..."; several such lines with texts
      list the choices, and state none of them;
    - the text of exactly one choice, alone in a line or behind "the answer is", where the texts are known;
    - else the one choice that the last line mentions, or those that it joins: "I think it is (B)", "Both A and C";
    - else, where that line mentions no letter, the one choice whose text stands as whole words in its last sentence and
      is not denied: "The capital of France is Paris.", "Paris, not Rome".

    A letter before a word ("a dog", "A dog", "I think") is an article or a pronoun. What is denied is not stated ("not
    A", "B is wrong", "排除B"), and what is taken back neither ("B? No, A"). "A or B" states nothing, whatever stands
    around it ("Either A or B, hard to say", "between A and B", "any of A, B"). "A and B", "A, B", "AB" and
    ``\\boxed{A} and \\boxed{B}`` state two, which is wrong unless the answer is both. "B. London", where London is the
    text of another choice, states nothing. A letter beyond the choices is wrong.

    **The answer** is a letter ("B", "(B)", "B. Paris"), the text of a choice, its place as a number (with
    ``index_base``), or several of these: ["A", "C"], "A, C" or "AC", of which the reply must name all, in any order,
    and no other. The texts of the choices stand in the task's metadata under ``choices_key``: a list, or a mapping of
    letters to texts, or ``{label: [...], text: [...]}``.

    Abstains where the task has no answer and where the play failed; an answer that is no choice is an error of the row,
    which is counted.
    """

    class Config(ComponentConfig):
        labels: Literal["letters", "digits"] = "letters"
        """How choices are called: A, B, C ... or 1, 2, 3 ..."""
        count: Annotated[int, Field(ge=2, le=26)] | None = None
        """How many choices there are; default: as many as the task's metadata list, else ten."""
        index_base: Literal[0, 1] | None = None
        """The number of the first choice where the answer is a whole number; default: such an answer is refused."""
        choices_key: str = "choices"
        """Where the task's metadata have the texts of the choices."""

    async def __call__(self, trajectory: Trajectory) -> float | None:
        if abstains(trajectory):
            return None
        labels, texts = self._choices(trajectory)
        reader = ChoiceReader(labels, texts)
        right = self._gold(trajectory, reader)
        return float(reader.read(final_part(trajectory.last_reply)) == right)

    def _choices(self, trajectory: Trajectory) -> tuple[Sequence[str], list[str]]:
        """Labels and, where they are known, texts. Raises DataError for metadata that are no choices."""
        given: Any = trajectory.task.metadata.get(self.config.choices_key)
        if hasattr(given, "tolist"):
            given = given.tolist()
        if given is None or given == [] or given == {}:
            return self._labels(self.config.count or LETTERS), []
        where = f"task {trajectory.task.id!r}: the metadata's {self.config.choices_key!r}"
        if isinstance(given, Mapping) and set(map(str.lower, map(str, given))) == {"label", "text"}:
            texts = next(value for key, value in given.items() if str(key).lower() == "text")
        else:
            texts = given.values() if isinstance(given, Mapping) else given
        texts = texts.tolist() if hasattr(texts, "tolist") else texts
        if isinstance(texts, str) or not all(isinstance(text, str | int | float) for text in texts):
            raise DataError(f"{where} are no list of texts: fix the row")
        found = [str(text) for text in texts]
        if not 2 <= (count := self.config.count or len(found)) <= len(string.ascii_uppercase):
            raise DataError(f"{where} are {count}; 2 to 26 are allowed")
        return self._labels(count), found

    def _labels(self, count: int) -> Sequence[str]:
        return [str(i + 1) for i in range(count)] if self.config.labels == "digits" else string.ascii_uppercase[:count]

    def _gold(self, trajectory: Trajectory, reader: ChoiceReader) -> Stated:
        answer = trajectory.task.answer
        answer = answer.tolist() if hasattr(answer, "tolist") else answer
        golds = answer if isinstance(answer, list | tuple) else [answer]
        found = [self._label(gold, reader) for gold in golds]
        union = NOTHING.union(*found)
        if not found or not all(found) or not union <= set(reader.labels):
            shown = f"{reader.labels[0]} to {reader.labels[-1]}"
            raise unreadable(trajectory, answer, f"a choice from {shown}, its text, or its number with index_base")
        return union

    def _label(self, gold: Any, reader: ChoiceReader) -> Stated:
        base = self.config.index_base
        number = int(gold) if isinstance(gold, str) and gold.strip().isdecimal() and len(gold) < 4 else gold
        if base is not None and isinstance(number, int) and not isinstance(number, bool):
            place = number - base
            return frozenset({reader.labels[place]}) if 0 <= place < len(reader.labels) else NOTHING
        if isinstance(gold, int) and not isinstance(gold, bool) and reader.digits:
            return frozenset({str(gold)})
        return reader.whole(gold) if isinstance(gold, str) else NOTHING
