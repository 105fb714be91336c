"""Distillation from a teacher with the student's tokens in a vocabulary that is padded to another size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from relax_core.models import hf
from relax_core.models.config import TinyModel
from relax_core.models.text import tiny_qwen3
from relax_core.models.words import word_tokenizer
from relax_core.testing.runs import TEXT_RUN, accounted, metrics, run_file, summary, train

WORDS: list[str] = TEXT_RUN["model"]["tiny"]["words"]
ALLOWED = 18
"""Of 20 tokens all but padding and unknown."""


def padded(folder: Path, size: int) -> dict[str, Any]:
    """The same model at every size, but for the rows of padding, which are loud."""
    tokenizer = word_tokenizer(WORDS)
    config = tiny_qwen3(TinyModel(words=tuple(WORDS), hidden=32, layers=1, init_std=0.3), tokenizer)
    with hf.seeded(3):
        plain = Qwen3ForCausalLM(config)
        config.vocab_size = size
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for wide, narrow in zip(model.parameters(), plain.parameters(), strict=True):
            wide.mul_(10)
            wide[: len(narrow)] = narrow
    hf.save_pretrained(model, tokenizer, folder)
    return {"id": "text", "path": str(folder)}


@pytest.mark.parametrize(("ours", "theirs"), [(20, 32), (32, 23)])
@pytest.mark.parametrize("over", ["sampled", "topk", "full"])
def test_the_student_begins_at_a_teacher_of_its_weights(tmp_path: Path, over: str, ours: int, theirs: int) -> None:
    teacher = {"id": "teacher", "model": padded(tmp_path / "theirs", theirs)}
    changes = {
        "steps": 2,
        "evaluation": [],
        "model": padded(tmp_path / "ours", ours),
        "algorithm": {"id": "opd", "over": over, "entropy": TEXT_RUN["algorithm"]["entropy"]},
        "stages": [teacher | ({"top_k": ALLOWED} if over == "topk" else {})],
        "trainer": {"lr": 1e-2},
    }
    directory = train(run_file(tmp_path, **changes))
    first, second = (line["train/kl_teacher"] for line in metrics(directory))
    assert abs(first) < 1e-5 < 1e-4 < abs(second)
    groups = summary(directory)["groups"]
    assert groups["trained"] == 8 and accounted(groups)
