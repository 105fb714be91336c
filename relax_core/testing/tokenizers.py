"""Tokenizers and chat templates of released models, for tests: ``make tokenizers`` fetches them; no weights.

folder = released("qwen3", tmp_path)             # skips the test where it was not fetched
adapter = TextAdapter(TextConfig(path=folder), MediaStore({}, 0))
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FETCHED = Path(os.environ.get("RELAX_TOKENIZERS") or Path(__file__).resolve().parents[2] / ".tokenizers")
"""Where they are: in the checkout, or wherever RELAX_TOKENIZERS says."""

RELEASED = ("qwen3", "llama3.1", "gemma3", "deepseek-v3")
"""Their names, as in ``tests/tokenizers.json``."""


def released(name: str, into: Path) -> Path:
    """The folder of a model with this tokenizer, made in the folder ``into``; skips the test where it was not fetched.

    The config is of a small Qwen3, whatever the tokenizer's model was: enough for an adapter, which reads no weights.
    Only the tokenizer's own end of a text stops a reply.
    """
    import pytest
    from transformers import Qwen3Config

    if name not in RELEASED:
        raise ValueError(f"there is no released tokenizer {name!r}; there are {', '.join(RELEASED)}")
    fetched = FETCHED / name
    if not (fetched / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer {name} is not in {FETCHED}: fetch it with `make tokenizers`")
    folder = into / name
    if not folder.exists():
        folder.mkdir(parents=True)
        for file in fetched.iterdir():
            (folder / file.name).symlink_to(file)
        size = _vocabulary(json.loads((fetched / "tokenizer.json").read_text(encoding="utf-8")))
        Qwen3Config(vocab_size=size, num_hidden_layers=1, eos_token_id=None).save_pretrained(folder)
    return folder


def _vocabulary(tokenizer: Mapping[str, Any]) -> int:
    """One more than the largest id."""
    return 1 + max(map(int, [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]))
