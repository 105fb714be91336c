"""Settings of model adapters, apart from their code so that reading a run file imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_core.interfaces import ComponentConfig

Option = bool | int | float | str


class TinyModel(ComponentConfig):
    """A random model that is small enough for a laptop, with a vocabulary of whole words."""

    words: Annotated[tuple[str, ...], Field(min_length=1)]
    """The vocabulary, besides special tokens and the names of the roles."""
    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    init_std: PositiveFloat = 0.1
    """Standard deviation of the random weights; much less learns far slower at this size."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of the random weights; default: the run's."""
    unknown_words: Literal["error", "keep"] = "error"
    """A word that is not in the vocabulary: an error of the row, or kept as one unknown token."""

    @model_validator(mode="after")
    def _shapes_and_words(self) -> Self:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide half of hidden "
                "and be a multiple of kv_heads"
            )
        bad = [w for w in self.words if not w or w.split() != [w] or w.startswith("<|")]
        if bad:
            raise ValueError(f"words: {bad[0]!r} is not a word; a word has no white space and does not begin with '<|'")
        return self


class ModelConfig(ComponentConfig):
    """What all adapters of Hugging Face models share: weights from a folder, or a tiny random model."""

    path: Path | None = None
    """A folder with a Hugging Face model and its tokenizer; nothing is ever downloaded."""
    tiny: TinyModel | None = None
    """A random model instead, for tests and demonstrations."""
    chat_template: Path | None = None
    """A file with a Jinja chat template to use instead of the tokenizer's own."""
    template_options: dict[str, Option] = {}
    """Variables for the chat template, such as ``enable_thinking: false``."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            found = "neither" if self.path is None else "both"
            raise ValueError(f"path and tiny: found {found}; give exactly one: a model folder, or a tiny random model")
        if self.path is not None and not (self.path / "config.json").is_file():
            raise ValueError(f"path: {self.path} holds no config.json; give the folder of a Hugging Face model")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(f"chat_template: there is no file {self.chat_template}; give a Jinja template's path")
        return self


class TextConfig(ModelConfig):
    """Settings of ``text``: any causal language model."""
