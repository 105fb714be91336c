"""A user's own model: a local Hugging Face folder of a causal language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from relax_core.media import MediaStore
from relax_core.models.config import TextConfig, TinyModel
from relax_core.models.text import TextAdapter
from relax_core.testing.runs import TEXT_RUN, run_file, summary, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with its tokenizer and chat template, as ``save_pretrained`` writes it."""
    tiny = TEXT_RUN["model"]["tiny"]
    config = TextConfig(tiny=TinyModel(**(tiny | {"words": tuple(tiny["words"])})))
    adapter = TextAdapter(config, MediaStore({}, 0))
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    adapter.save(adapter.load("cpu", torch.float32), folder)
    return folder


def test_it_trains(folder: Path, tmp_path: Path) -> None:
    directory = train(run_file(tmp_path, model={"id": "text", "path": str(folder)}))
    assert summary(directory)["groups"]["trained"] == 24
    trained = load_file(directory / "checkpoints" / "step-00000006" / "trainer" / "weights.safetensors")
    assert any((trained[name] != value).any() for name, value in load_file(folder / "model.safetensors").items())
