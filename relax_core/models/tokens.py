"""What adapters of Hugging Face models share on the side of messages: tokenizers, and ids that end or never appear.

Imports no torch: a process that only plays needs none for this.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from relax_core.errors import ConfigError
from relax_core.models.template import special_tokens

Ids = int | Collection[int] | None
"""What a config may hold in ``eos_token_id``."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder. Raises ConfigError."""
    from transformers import AutoTokenizer  # with torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path: no tokenizer can be loaded from {folder}: {in_a_line(error)}") from error
    names = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any((folder / name).is_file() for name in names):  # transformers makes an empty one then
        raise ConfigError(f"model.path: {folder} holds no tokenizer; one of these is needed: {', '.join(names)}")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"model.path: {folder} has a tokenizer without tokenizer.json; convert it to a fast one")
    return tokenizer


def stop_ids(tokenizer: PreTrainedTokenizerFast, folder: Path | None, *configs: Ids) -> frozenset[int]:
    """Every id that ends a reply: those of the tokenizer, of the generation config, and of the model's ``configs``."""
    found: set[int] = set()
    named: list[Ids] = [getattr(tokenizer, "eos_token_id", None), *configs]
    if folder is not None and (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    for ids in named:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    if not found:
        raise ConfigError("model.path: neither the tokenizer nor generation_config.json has an eos_token_id; add one")
    return frozenset(found)


def banned_ids(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, stops: Collection[int], placeholders: Collection[int] = ()
) -> tuple[int, ...]:
    """What must never be sampled: special tokens and placeholders except stops, and ids that stand for no token."""
    known = set(tokenizer.get_vocab().values())
    if max(known) >= vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer has ids up to {max(known)}, the model a vocabulary of {vocab_size}; give a "
            "folder whose tokenizer belongs to its model"
        )
    unknown = set(range(vocab_size)) - known
    return tuple(sorted((unknown | set(special_tokens(tokenizer)) | set(placeholders)) - set(stops)))


def pad_id(tokenizer: PreTrainedTokenizerFast, stops: Collection[int]) -> int:
    """Padding is never seen through a mask, so any id will do where the tokenizer has none."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else min(stops)


def in_a_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    return " ".join(str(error).split())[:200]
