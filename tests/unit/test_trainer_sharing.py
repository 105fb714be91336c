"""Prompts that rows share, models that cannot share them, and media in prompts and replies."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_algorithms.grpo import Grpo
from relax_algorithms.options import EntropyBonus
from relax_core.errors import ConfigError
from relax_core.interfaces import Row
from relax_core.testing.gradients import (
    KINDS,
    Banning,
    assert_close,
    banning,
    caught,
    gradients,
    rows_of_lengths,
)
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import forward, row, tiny_trainer, train
from relax_core.types import MediaRef


def grpo(entropy: float | None = None, **settings: Any) -> Grpo:
    bonus = None if entropy is None else EntropyBonus(start=entropy, end=entropy, steps=1)
    return Grpo(Grpo.Config(entropy=bonus, **settings))


class Counting(Banning):
    """Counts the tokens that the backbone computes."""

    tokens = 0

    def backbone(self, model: torch.nn.Module, **inputs: Any) -> torch.Tensor:
        self.tokens += inputs["input_ids"].numel()
        return super().backbone(model, **inputs)


def test_a_prompt_is_computed_once_for_all_its_rows() -> None:
    plain = banning()
    adapter = Counting(plain.config, plain.media)
    trainer = tiny_trainer(adapter)
    rows = [row(f"g/{i}", [5, 6, 7, 8, 9, 10, 11], [7, 8, 1]) for i in range(8)]
    result = train(trainer, 0, [rows], grpo())
    assert adapter.tokens == 7 + 8 * 2 == result.metrics["computed_tokens"]


def test_a_model_that_cannot_share_gets_whole_padded_rows() -> None:
    plain = banning()
    adapter = Counting(plain.config, plain.media)
    adapter.shares_prefix = False
    trainer = caught(adapter)
    rows = rows_of_lengths([3, 1, 5, 7])
    assert trainer.cost(rows) == 4 * max(len(r.columns["tokens"]) - 1 for r in rows)
    train(trainer, 0, [rows], grpo())
    assert adapter.tokens == trainer.cost(rows)
    sharing = caught(banning())
    train(sharing, 0, [rows], grpo())
    assert_close(gradients(trainer), gradients(sharing), 1e-6)


def test_engine_and_trainer_do_not_share_a_config() -> None:
    from transformers import Qwen3ForCausalLM

    shared = cast(Any, tiny_adapter().load("cpu", torch.float32)).config

    class Sharing(Banning):
        def load(self, device: str, dtype: torch.dtype) -> Any:
            torch.manual_seed(0)
            return cast(Any, Qwen3ForCausalLM(shared)).to(dtype)

    plain = banning()
    trainer = tiny_trainer(Sharing(plain.config, plain.media))
    other = Qwen3ForCausalLM(shared)
    rows = rows_of_lengths([3])
    with trainer.compute.run([piece(rows[0])], frozenset({"logprobs"})):
        assert shared._attn_implementation == other.config._attn_implementation == "sdpa"
        other(input_ids=torch.tensor([[5, 6]]))


def piece(r: Row) -> Any:
    from relax_core.torch.layout import Piece

    return Piece.of(r)


def test_a_model_with_an_attention_of_its_own_is_refused_where_it_would_be_wrong() -> None:
    class Eager(Banning):
        def load(self, device: str, dtype: torch.dtype) -> Any:
            model = super().load(device, dtype)
            for layer in cast(Any, model).model.layers:  # what is set in the model's config is not seen
                layer.self_attn.config = type(model.config)(**model.config.to_dict())
                layer.self_attn.config._attn_implementation = "sdpa"
            return model

    plain = banning()
    with pytest.raises(ConfigError, match=r"trainer.layout: Qwen3ForCausalLM does not attend .* 'padded'"):
        forward(tiny_trainer(Eager(plain.config, plain.media)), rows_of_lengths([3]))
    forward(tiny_trainer(Eager(plain.config, plain.media), layout="padded"), rows_of_lengths([3]))


def test_media_in_prompts_and_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny_adapter(images=True)
    colours = {"a": [0.9, 0.1, 0.0], "b": [0.0, 0.3, 0.8]}
    for key, colour in colours.items():
        features = {"colour": np.array(colour, np.float32)}
        adapter.media.features(key, lambda made=features: made)  # type: ignore[misc]
    image, crop = MediaRef("image", "a", 1, 1), MediaRef("image", "b", 6, 1)
    rows = [
        row("g/0", [5, 3, 6], [7, 8, 9, 3, 9, 10, 1], mask=[1, 1, 0, 0, 0, 1, 1], media=[image, crop]),
        row("g/1", [5, 3, 6], [8, 1], media=[image]),
        row("h/0", [5, 4, 6], [8, 1]),
    ]
    found = {}
    for kind in KINDS:
        trainer = caught(adapter, layout=kind)
        result = train(trainer, 0, [rows], grpo())
        found[kind] = gradients(trainer)
        assert {"mismatch/image/abs", "mismatch/text/k3", "mismatch/abs"} <= result.metrics.keys()
    assert_close(found["shared"], found["padded"], 1e-6)
    assert_close(found["packed"], found["padded"], 1e-6)
