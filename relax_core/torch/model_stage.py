"""What stages that run a frozen model share: the model, its vocabulary, and columns for whole groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from relax_core.errors import ConfigError, DataError, RelaxError
from relax_core.interfaces import Columns, ModelAdapter, Row, Stage
from relax_core.torch.annotate import Annotator

if TYPE_CHECKING:
    from relax_core.bus import Claim
    from relax_core.config.schema import ComponentSection
    from relax_core.run import Run
    from relax_core.setup import StageSetup
    from relax_core.torch.stage_config import ModelStageConfig

_BUDGETS = {"cpu": 4096}


class ModelStage(Stage):
    """Adds to each row what a frozen model says of its sampled tokens, at the run's temperature and with its bans.

    It takes whole groups, so that a prompt is computed once, and only scored ones: what the filters drop is never
    computed. Models of another section than the run's get the media features that the run's own model adapter made, and
    the positions: they must be of a kind that reads the same processing. Their vocabulary may be padded to another
    size: see ``vocabulary_problem``.
    """

    by = "group"
    needs = frozenset({"reward", "tokens", "mask", "positions", "media"})
    sources: ClassVar[Mapping[str, tuple[str, str]]]
    """Column -> (output to ask the model for, name of what it gives)."""

    def __init__(self, config: ModelStageConfig, setup: StageSetup) -> None:
        """Raises ConfigError, before the weights are loaded, for a model whose vocabulary does not fit the run's."""
        run, student = setup.run, setup.adapter
        self.count, self.exact, self.order = setup.count, setup.exact, setup.order
        self.where = place_of(self.name, run)
        self.columns = sorted(setup.columns)
        self.adapter = adapter_of(section_of(config), run, student, self.where)
        if problems := list(self.model_problems(config, student, self.adapter, setup.columns)):
            raise ConfigError(*(f"{self.where}.{line}" for line in problems))
        try:
            self.annotator = frozen(config, self.adapter, run.config.sampling.temperature)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error
        self.model = self.annotator.compute.model
        self.outputs = frozenset(self.sources[column][0] for column in self.columns)
        self.top_k: int | None = None
        self.weights_lock = asyncio.Lock()
        """Held while groups are computed: new weights wait, so that none sees two versions."""

    @classmethod
    def model_problems(
        cls, config: ModelStageConfig, student: ModelAdapter, own: ModelAdapter, columns: frozenset[str]
    ) -> Iterator[str]:
        """What is wrong with the stage's model beside the run's, without weights: a line each, which begins with the
        setting."""
        if line := vocabulary_problem(student, own):
            yield f"model: {line}"

    @classmethod
    def deep_problems(
        cls, config: ModelStageConfig, run: Run, student: ModelAdapter, columns: frozenset[str]
    ) -> list[str]:
        """For the deep check: the stage's tokenizer and adapter are built, its weights are not."""
        where = place_of(cls.name, run)
        try:
            own = adapter_of(section_of(config), run, student, where)
        except RelaxError as error:
            return [str(error)]
        return [f"{where}.{line}" for line in cls.model_problems(config, student, own, columns)]

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        self._refuse_unread_media(claim.rows)
        # A group may be evicted meanwhile: its media must not leave the store while they are read.
        keys = [ref.key for row in claim.rows for ref in row.columns["media"]]
        self.adapter.media.retain(keys)
        try:
            async with self.weights_lock:
                made = await self.annotator.forward(claim.rows, self.outputs, self.top_k)
        finally:
            self.adapter.media.release(keys)
        return {
            row.id: {column: found[self.sources[column][1]] for column in self.columns}
            for row, found in zip(claim.rows, made, strict=True)
        }

    def _refuse_unread_media(self, rows: Sequence[Row]) -> None:
        """A model that reads no images would take their placeholders for words."""
        for row in rows:
            for ref in row.columns["media"]:
                if ref.kind not in self.adapter.kinds:
                    raise DataError(
                        f"{self.where}.model: row {row.id} holds {ref.kind}, which this model does not read: take one "
                        "of the run's own kind"
                    )


def place_of(id: str, run: Run) -> str:
    """Where the run file says something of a stage."""
    listed = (f"stages.{i}" for i, section in enumerate(run.config.stages) if section.id == id)
    return next(listed, f"stages.{id}")


def section_of(config: ModelStageConfig) -> ComponentSection | None:
    """The stage's own model; None: the run's."""
    section: ComponentSection | None = getattr(config, "model", None)
    return section


def adapter_of(section: ComponentSection | None, run: Run, student: ModelAdapter, where: str) -> ModelAdapter:
    """The run's adapter, or one of the section's model with the run's media and banned tokens. Raises RelaxError."""
    if section is None:
        return student
    try:
        own: ModelAdapter = run.stack.build("models", section, student.media, run.config.seed, where=f"{where}.model")
    except ConfigError as error:
        prefixed = (line if line.startswith(where) else f"{where}: {line}" for line in error.problems)
        raise ConfigError(*prefixed) from error
    own.banned_token_ids = bans_of(student, own.vocab_size)
    return own


def bans_of(student: ModelAdapter, vocab_size: int) -> tuple[int, ...]:
    """What must be banned of a vocabulary of this size so that the rest is what the student may sample."""
    common = (id for id in student.banned_token_ids if id < vocab_size)
    return (*common, *range(student.vocab_size, vocab_size))


def allowed_count(student: ModelAdapter) -> int:
    """How many tokens the student may sample."""
    return student.vocab_size - len(set(student.banned_token_ids))


def vocabulary_problem(student: ModelAdapter, other: ModelAdapter) -> str | None:
    """Why log-probs of the two models cannot be compared, or None.

    They need the same token under every id that the run's tokenizer knows. Their sizes may differ: models of one family
    pad theirs as each likes. What only the other has is banned for it; what only the run's model has must be padding,
    which is never sampled and stands in no prompt. Adapters without a tokenizer of Hugging Face's kind are compared by
    size alone.
    """
    ours, theirs = _tokens(student), _tokens(other)
    if line := _size_problem(student, other, ours, bool(ours and theirs)):
        return (
            f"has a vocabulary of {other.vocab_size:,} tokens, the run's model one of {student.vocab_size:,}, and "
            f"{line}; their log-probs cannot be compared: take a model with the run's vocabulary"
        )
    for id in sorted(ours) if theirs else ():
        if ours[id] != theirs.get(id):
            found = repr(theirs[id]) if id in theirs else "no token"
            return (
                f"has {found} as token {id}, the run's model has {ours[id]!r}; their log-probs cannot be "
                "compared: take a model with the run's vocabulary"
            )
    return None


def _size_problem(student: ModelAdapter, other: ModelAdapter, ours: dict[int, str], told: bool) -> str | None:
    """Of the ids that only one of the two has, the first that matters."""
    if not told and student.vocab_size != other.vocab_size:
        return (
            f"nothing tells whether id {min(student.vocab_size, other.vocab_size)}, which one of them lacks, is padding"
        )
    banned = set(student.banned_token_ids)
    for id in range(other.vocab_size, student.vocab_size):
        if id in ours:  # a banned one too: special tokens stand in prompts
            return f"lacks token {id}, {ours[id]!r} there"
        if id not in banned:
            return f"lacks token {id}, which may be sampled"
    return None


def _tokens(adapter: ModelAdapter) -> dict[int, str]:
    """By id; empty where the adapter does not tell."""
    vocabulary = getattr(getattr(adapter, "tokenizer", None), "get_vocab", dict)
    return {id: token for token, id in vocabulary().items()}


def frozen(config: ModelStageConfig, adapter: ModelAdapter, temperature: float) -> Annotator:
    """A copy of the adapter's model that no gradient changes, and its forward. Raises ConfigError."""
    device, dtype = placement(config)
    model = adapter.load(device, dtype).requires_grad_(False).train(False)
    budget = config.tokens_per_micro_batch or _BUDGETS.get(device, 16384)
    return Annotator(model, adapter, config.layout, temperature, budget)


def placement(config: ModelStageConfig) -> tuple[str, torch.dtype]:
    """Device and type of the weights."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = ("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return device, dtype
