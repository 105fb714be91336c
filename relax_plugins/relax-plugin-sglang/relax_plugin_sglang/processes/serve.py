"""Starts a server, in the server's own interpreter: SGLang's launcher, after two repairs of it.

    python serve.py ARGUMENTS OF sglang.launch_server

New weights are copied all at once: see ``relax_replay.py``. And a banned token is a logit's bias, of which SGLang
writes those of each new batch one by one: on a GPU a kernel launch for each banned token of each request, some 300 for
a Qwen3. Here the row of a set of biases is made once, and kept. Without this file everything works as well, and slower.

The schedulers are processes that import this file again before they begin, so the repairs stand at module level.
"""

from __future__ import annotations

import functools
import runpy
from typing import Any

import relax_replay
import torch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_KEPT = 64
"""Sets of biases whose rows are kept."""


class Biases:
    """Rows of V numbers by the biases that they hold, most of them 0."""

    def __init__(self) -> None:
        self._rows: dict[Any, torch.Tensor] = {}

    def batch(self, biases: list[dict[str, float] | None], vocab_size: int, device: Any) -> torch.Tensor:
        """(len(biases), V), float32; equal rows share memory where all are equal."""
        keys = [tuple((bias or {}).items()) for bias in biases]
        distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        rows = torch.stack([self._row(key, vocab_size, device) for key in distinct])
        if len(distinct) == 1:
            return rows.expand(len(keys), -1)
        return rows[torch.tensor([distinct[key] for key in keys], device=device)]

    def _row(self, key: tuple[tuple[str, float], ...], vocab_size: int, device: Any) -> torch.Tensor:
        found = self._rows.get((key, vocab_size, str(device)))
        if found is None:
            if len(self._rows) >= _KEPT:
                self._rows.clear()
            found = torch.zeros(vocab_size)
            found[[int(token) for token, _ in key]] = torch.tensor([value for _, value in key])
            found = self._rows[key, vocab_size, str(device)] = found.to(device)
        return found


def repair(kind: Any) -> None:
    """Let ``kind`` (SamplingBatchInfo) make the biases of a batch from rows that are kept."""
    original, biases = kind.from_schedule_batch.__func__, Biases()

    @functools.wraps(original)
    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        parameters = [request.sampling_params for request in batch.reqs]
        given = [each.logit_bias for each in parameters]
        if not any(given):
            return original(cls, batch, vocab_size)
        try:
            for each in parameters:
                each.logit_bias = None
            made = original(cls, batch, vocab_size)
        finally:
            for each, bias in zip(parameters, given, strict=True):
                each.logit_bias = bias
        made.logit_bias = biases.batch(given, vocab_size, batch.device)
        return made

    kind.from_schedule_batch = classmethod(from_schedule_batch)


repair(SamplingBatchInfo)
relax_replay.repair(ModelRunner)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
