"""The deep check of a run: its tokenizer, adapter, chat template and media, on tasks of every environment.

It builds what the run would build, short of the weights, and tries on real tasks what a play relies on: every medium
decodes and has its placeholders, and what comes between two samplings continues the tokens that were sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from relax_core.bad_rows import sample_problem
from relax_core.check_data import NAMED, sampled
from relax_core.check_memory import memory_problems
from relax_core.check_template import TURNS, conversation_problems, template_lines, where
from relax_core.config.columns import planned_stages
from relax_core.config.resolve import component_problems
from relax_core.errors import DataError
from relax_core.hook_manager import describe
from relax_core.interfaces import Segment
from relax_core.tasks import located
from relax_core.types import MEDIA_KINDS, Encoded, Task

if TYPE_CHECKING:
    from relax_core.interfaces import Environment, ModelAdapter
    from relax_core.media import MediaStore
    from relax_core.run import Run

HEAD, RANDOM = 32, 32
"""Tasks of each split that are encoded, their media decoded: at its beginning, and at random among the others."""

TALKS = 8
"""With so many of these a conversation is played."""


def deep_problems(run: Run, report: Callable[[str], None]) -> list[str]:
    """One line for each problem; what was tried, and a prompt of each environment as it is read, are reported."""
    from relax_core.run import build_adapter

    problems = list(component_problems(run.config, run.stack, heavy=True))
    if problems:
        return problems
    adapter, media = build_adapter(run)
    problems += stage_problems(run, adapter)
    problems += memory_problems(run, adapter, report)
    for i, section in enumerate(run.config.environments):
        environment: Environment = run.stack.build("environments", section, where=f"environments.{i}")
        splits: list[Literal["train", "eval"]] = ["train"]
        if any(evaluation.environment == section.label for evaluation in run.config.evaluation):
            splits.append("eval")
        for split in splits:
            tried = Trial(adapter, media)
            tasks = environment.tasks(split)
            places = sampled(len(tasks), run.config.seed, HEAD, RANDOM)
            for place in places:
                tried.row(tasks, place, section.label)
            for line in list(tried.bad.values())[:NAMED]:
                report(f"environments.{section.label}: {split}: bad row: {line}")
            report(f"environments.{section.label}: {split}: {tried.summary()}")
            problems += [f"environments.{section.label}: {split}: {line}" for line in tried.problems()]
            allowed = run.config.data.max_bad_fraction
            if problem := sample_problem(tried.bad, places, len(tasks), HEAD, allowed):
                first = next(iter(tried.bad.values()))
                problems.append(f"environments.{section.label}: {split}: {first}: {problem}")
            if split == "train" and tried.example is not None:
                for line in tried.turns:
                    report(f"environments.{section.label}: {line}")
                text = rendered(adapter, tried.example)
                report(f"environments.{section.label}: a prompt as the model reads it: {text}")
    return problems


def stage_problems(run: Run, adapter: ModelAdapter) -> Iterator[str]:
    """What stages with a model of their own find wrong with it, before any weights are loaded: its vocabulary, ..."""
    from relax_core.run import build_algorithm

    for plan in planned_stages(run.config, run.stack, build_algorithm(run))[0]:
        cls = run.stack.load("stages", plan.section.id, plan.where)
        if hasattr(cls, "deep_problems"):
            config = run.stack.config("stages", plan.section, plan.where)
            yield from cls.deep_problems(config, run, adapter, plan.columns)


class Trial:
    """Tries tasks of one split and sums up what went wrong."""

    def __init__(self, adapter: ModelAdapter, media: MediaStore) -> None:
        self.adapter, self.media = adapter, media
        self.tasks = 0
        self.bad: dict[int, str] = {}
        """Why rows cannot be used, by their places; a run leaves them out."""
        self.lengths: list[int] = []
        self.placeholders: Counter[str] = Counter()
        self.rewrites: list[str] = []
        self.turns: list[str] = []
        """What the template does at each kind of turn."""
        self.example: Encoded | None = None
        self._problems: dict[str, list[str]] = {}

    def row(self, tasks: Sequence[Task], place: int, environment: str) -> None:
        """Try the task at a place, which may be a bad row."""
        try:
            self.task(replace(tasks[place], environment=environment))
        except DataError as error:
            self.bad[place] = str(located(tasks, place, error))

    def task(self, task: Task) -> None:
        """Encode one task, and play a fabricated conversation on some. Raises DataError for one that cannot be used."""
        try:
            encoded = self.adapter.encode(task.messages)
        except DataError:
            raise
        except Exception as error:
            self._wrong(task, f"cannot be encoded: {describe(error)}")
            return
        finally:
            self.tasks += 1
        self.example = self.example or encoded
        self.lengths.append(len(encoded.ids))
        for ref in encoded.media:
            self.placeholders[ref.kind] += ref.length
        try:
            for line in encoding_problems(self.adapter, self.media, task, encoded):
                self._wrong(task, line)
            if len(self.lengths) <= TALKS:
                for line in conversation_problems(self.adapter, task, self.rewrites):
                    self._wrong(task, line)
            if len(self.lengths) == 1:
                self.turns = template_lines(self.adapter, task)
        except Exception as error:
            self._wrong(task, describe(error))

    def _wrong(self, task: Task, line: str) -> None:
        self._problems.setdefault(task.id, []).append(line)

    def problems(self) -> Iterator[str]:
        """The first problem, with the number of tasks that have any."""
        for id, lines in list(self._problems.items())[:1]:
            more = f" ({len(lines) - 1} more of this task)" if len(lines) > 1 else ""
            yield f"{len(self._problems)} of {self.tasks} tasks tried fail, first: task {id!r}: {lines[0]}{more}"

    def summary(self) -> str:
        """What was tried, in one line."""
        longest = f", prompts of {min(self.lengths)} to {max(self.lengths)} tokens" if self.lengths else ""
        media = "".join(f", {count} {kind} placeholders" for kind, count in sorted(self.placeholders.items()))
        count, later = len(self.rewrites), min(len(self.lengths), TALKS) * (TURNS - 1)
        rewrites = (
            f"; a new sample starts at {count} of {later} later turns, first: {self.rewrites[0]}" if count else ""
        )
        return f"{len(self.lengths)} tasks encoded{longest}{media}{rewrites}"


# --- one encoding ---------------------------------------------------------------------------------------------------


def encoding_problems(adapter: ModelAdapter, media: MediaStore, task: Task, encoded: Encoded) -> Iterator[str]:
    """Whether ids, placeholders, features and positions of a prompt fit each other."""
    ids = encoded.ids
    if not ids:
        yield "is encoded to no token"
        return
    if not 0 <= min(ids) <= max(ids) < adapter.vocab_size:
        yield f"ids run from {min(ids)} to {max(ids)}, the vocabulary has {adapter.vocab_size}"
    wanted = Counter(MEDIA_KINDS[type(part)] for m in task.messages for part in m.media())
    found = Counter(ref.kind for ref in encoded.media)
    if wanted != found:
        yield f"media are {_counts(wanted)}, in the tokens are {_counts(found)}"
    yield from placeholder_problems(encoded, adapter.banned_token_ids)
    for ref in encoded.media:
        media.get(ref.key)  # raises DataError when the features are missing
    if encoded.positions is not None and encoded.positions.shape != (3, len(ids)):
        yield f"positions have the shape {encoded.positions.shape}, not (3, {len(ids)})"
    inputs = adapter.forward_inputs([Segment(ids, encoded.media, encoded.positions)], len(ids))
    shape = tuple(inputs["input_ids"].shape)
    if shape != (1, len(ids)):
        yield f"forward_inputs gives input_ids of shape {shape}, not (1, {len(ids)})"


def placeholder_problems(encoded: Encoded, banned: Sequence[int]) -> Iterator[str]:
    """Placeholders must be exactly the spans of the media, and must never be sampled."""
    end = 0
    placeholder_ids: set[int] = set()
    for ref in encoded.media:
        span = encoded.ids[ref.start : ref.start + ref.length]
        if ref.start < end or ref.length < 1 or len(span) < ref.length:
            yield f"{where(ref)} overlaps another, or is empty or outside of the {len(encoded.ids)} tokens"
            return
        end = ref.start + ref.length
        placeholder_ids.update(span)
    allowed = sorted(placeholder_ids - set(banned))
    if allowed:
        yield f"placeholder ids {allowed} are not banned: the policy could sample them"
    count = sum(token in placeholder_ids for token in encoded.ids)
    covered = sum(ref.length for ref in encoded.media)
    if count != covered:
        yield f"{count} placeholders are in the tokens, {covered} belong to media"


def _counts(kinds: Counter[str] | Counter[Literal["image", "audio", "video"]]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


# --- what the model reads -------------------------------------------------------------------------------------------


def rendered(adapter: ModelAdapter, encoded: Encoded, limit: int = 2000) -> str:
    """Tokens as text: media as ``[image: 16 tokens]``, tokens without a text of their own as ``<id>``."""
    starts = {ref.start: ref for ref in encoded.media}
    text, at = "", 0
    plain: list[int] = []
    while at < len(encoded.ids):
        ref = starts.get(at)
        token = encoded.ids[at]
        if ref is None and adapter.decode([token]):
            plain.append(token)
            at += 1
            continue
        text += adapter.decode(plain) if plain else ""
        plain = []
        text += f"[{ref.kind}: {ref.length} tokens]" if ref else f"<{token}>"
        at += ref.length if ref else 1
    text += adapter.decode(plain) if plain else ""
    return repr(text if len(text) <= limit else text[:limit] + "...")
