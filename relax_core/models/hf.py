"""What adapters of Hugging Face models share on the model's side: loading, saving, and the forward call.

It imports torch, and transformers' models only where one is made or written: the adapter of a process that has no model
costs little (see tokens.py for what every process needs).

Shape legend: B rows, W width, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from relax_core.errors import ConfigError
from relax_core.interfaces import ModelAdapter, Segment
from relax_core.models.tokens import in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's CPU generator at ``seed``, and afterwards as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def placed(model: PreTrainedModel, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model on a device, parameters in ``dtype``, in evaluation mode (no dropout: engine and trainer must agree).

    Buffers keep their type: rotary frequencies in bfloat16 would shift positions.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    module: torch.nn.Module = model
    module.to(device)
    module.train(False)
    return model


def load_pretrained(kind: Any, folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """``kind.from_pretrained`` from a local folder; weights that are missing are an error, never random."""
    from transformers import PreTrainedModel

    with _quiet():
        model, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    wrong = sorted([*info["missing_keys"], *(m[0] for m in info["mismatched_keys"])])
    if wrong:
        raise ConfigError(
            f"model.path: {folder} lacks {len(wrong)} of the model's weights, or has them in another shape "
            f"({wrong[0]}, ...); give a complete checkpoint of {type(model).__name__}"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def save_pretrained(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model folder: weights, configs and tokenizer with its chat template."""
    from transformers import PreTrainedModel

    assert isinstance(model, PreTrainedModel)
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports: a run shows its own bar, and errors say what is wrong."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def hidden_states(module: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Last hidden states (B, W, H) of a decoder.

    A cache may be called ``cache`` or ``past_key_values``; a 4-D mask may be boolean (True: seen) or added to scores.
    """
    named = dict(inputs)
    mask = named.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.dtype == torch.bool and _adds_masks(module):
        weights: torch.Tensor = next(module.parameters())
        added = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device)
        named["attention_mask"] = added.masked_fill(~mask, torch.finfo(weights.dtype).min)
    for name in ("cache", "past_key_values"):
        if name in named:
            named[_cache_name(module.forward)] = named.pop(name)
    hidden = module(**named).last_hidden_state
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _adds_masks(module: torch.nn.Module) -> bool:
    """Eager attention would add True as 1."""
    return getattr(module.config, "_attn_implementation", None) == "eager"


def _cache_name(forward: Callable[..., Any]) -> str:
    """transformers is renaming ``past_key_values``; the new name spares a warning in every forward."""
    return "cache" if "cache" in _parameters(getattr(forward, "__func__", forward)) else "past_key_values"


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The same keyword arguments with their tensors on ``device``, those in a mapping of masks too."""

    def moved(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: moved(v) for k, v in value.items()}
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    return {k: moved(v) for k, v in inputs.items()}


def token_rows(segments: Sequence[Segment], width: int, pad_id: int) -> torch.Tensor:
    """Right-padded ids (B, W), int64."""
    ids_BW = torch.full((len(segments), width), pad_id)
    for row, segment in enumerate(segments):
        ids_BW[row, : len(segment.ids)] = torch.as_tensor(segment.ids, dtype=torch.int64)
    return ids_BW


@torch.no_grad()
def check_forward(adapter: ModelAdapter, model: PreTrainedModel) -> None:
    """Refuse a model whose logits the adapter does not reproduce: two packed rows against each row by itself.

    Catches what an architecture may do beyond embeddings, decoder and head (scaled or capped logits, positions that are
    not an input, masks that are ignored). Raises ConfigError.
    """
    banned = set(adapter.banned_token_ids)
    allowed = [i for i in range(adapter.vocab_size) if i not in banned]
    rows = [allowed[:4], allowed[2:5]]  # shorter than any sliding window, which this one mask cannot express
    lengths = torch.tensor([len(r) for r in rows])
    owner_W = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    order_W = torch.arange(len(owner_W))
    mask = (owner_W[:, None] == owner_W[None]) & (order_W[:, None] >= order_W[None])
    packed = Segment([i for r in rows for i in r], positions=torch.cat([torch.arange(n) for n in lengths]).numpy())
    name = type(model).__name__
    try:
        inputs = adapter.forward_inputs([packed], len(packed.ids))
        hidden = adapter.backbone(model, **inputs, attention_mask=mask[None, None].to(model.device), use_cache=False)
    except (TypeError, ValueError, RuntimeError) as error:  # whatever an architecture says to inputs it does not take
        raise ConfigError(
            f"model.path: {name} does not run with packed rows and given positions: {type(error).__name__}: "
            f"{in_a_line(error)}; use another architecture"
        ) from error
    got_WV = adapter.head(model, hidden)[0].float()
    alone = [model(input_ids=torch.tensor([r], device=model.device), use_cache=False).logits[0].float() for r in rows]
    want_WV = torch.cat(alone)
    tolerance = (1e-3 if model.dtype == torch.float32 else 5e-2) * max(1.0, float(want_WV.abs().max()))
    difference = float((got_WV - want_WV).abs().max()) if got_WV.shape == want_WV.shape else float("inf")
    if not difference <= tolerance:
        raise ConfigError(
            f"model.path: the logits of {name} differ by {difference:.2g} (allowed: {tolerance:.2g}) when rows are "
            "packed and the head is applied apart; use another architecture, or an adapter of its own"
        )
