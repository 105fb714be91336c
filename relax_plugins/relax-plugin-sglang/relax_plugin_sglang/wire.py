"""Between the engine's nouns and the server's JSON: what a request asks for, and what an answer says.

The log-probs that the server returns are those of the distribution that it sampled from: banned tokens out, temperature
applied, and (as ours) before top-k and top-p cut it; of a greedy request, at temperature 1.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_core.errors import EngineError
from relax_core.keys import draw_stream
from relax_core.types import Stop
from relax_plugin_sglang.media import carried

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from relax_core.interfaces import ModelAdapter, Request

BANNED = -1e9
"""Added to the logit of a token that must not be sampled: finite, for JSON."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request to the server brought."""

    ids: list[int]
    logprobs: list[float]
    stop: Stop | None
    """None: it ended at a token at which the model's own settings end, and ours do not: there is more to sample."""
    experts: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """What is the same in all requests of one engine. ``seed``: None where the server draws as it likes."""

    stop_ids: frozenset[int]
    bias: Mapping[str, float]
    seed: int | None = None
    experts: tuple[int, int] | None = None
    """(layers, experts of a token), where experts are asked for."""
    adapter: ModelAdapter | None = None
    """Of the model, where it reads media."""
    _stops: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_stops", sorted(self.stop_ids))

    @classmethod
    def of(cls, adapter: ModelAdapter, seed: int | None, experts: tuple[int, int] | None) -> Wire:
        biases = {str(i): BANNED for i in adapter.banned_token_ids}
        return cls(adapter.stop_ids, biases, seed, experts, adapter if adapter.kinds else None)

    def body(self, request: Request, rid: str, salt: str) -> dict[str, Any]:
        """JSON of /generate. ``salt``: requests share cached prefixes only with those of an equal one."""
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - request.drawn,
            "temperature": sampling.temperature,
            "stop_token_ids": self._stops,
        }
        if sampling.top_p < 1:
            parameters["top_p"] = sampling.top_p
        if sampling.top_k:
            parameters["top_k"] = sampling.top_k
        if self.bias:
            parameters["logit_bias"] = self.bias
        if self.seed is not None:  # a signed number of 64 bits; the position in the row does the rest
            parameters["sampling_seed"] = draw_stream(self.seed, request.key) >> 1
        body: dict[str, Any] = {
            "input_ids": request.prompt.ids,
            "rid": rid,
            "sampling_params": parameters,
            "return_logprob": True,
            "extra_key": salt,
        }
        if self.adapter is not None and request.prompt.media:
            body["image_data"] = [carried(self.adapter, request.prompt)]
        if self.experts is not None:
            body["return_routed_experts"] = True
        return body

    def answer(self, found: Mapping[str, Any], prompt: int) -> Answer:
        """Raises EngineError for one that is no sample, with the server's words."""
        meta = found["meta_info"]
        ids: list[int] = list(found.get("output_ids") or ())
        pairs = meta.get("output_token_logprobs") or ()
        logprobs = [pair[0] for pair in pairs]
        if [pair[1] for pair in pairs] != ids or None in logprobs:
            raise EngineError(
                f"engine sglang: an answer has {len(ids)} tokens and {len(logprobs)} log-probs, which must be as many, "
                "of the same tokens, each a number; does another program change the server's requests?"
            )
        stop = self._stop(ids, meta["finish_reason"])
        if stop is not Stop.ABORT and (read := meta.get("prompt_tokens", prompt)) != prompt:
            raise EngineError(
                f"engine sglang: the server read {read} tokens of a prompt of {prompt}; it must take ids and media as "
                "they are: does it change placeholders?"
            )
        return Answer(ids, logprobs, stop, self._experts(meta, prompt + len(ids)))

    def _stop(self, ids: list[int], reason: Mapping[str, Any]) -> Stop | None:
        kind = reason.get("type")
        if kind == "abort":
            return Stop.ABORT
        if ids and ids[-1] in self.stop_ids:
            return Stop.EOS
        if kind == "length":
            return Stop.LENGTH
        if kind == "stop" and isinstance(reason.get("matched"), int):
            return None
        raise EngineError(f"engine sglang: the server ended a request by {dict(reason)}; expected a token or a length")

    def _experts(self, meta: Mapping[str, Any], tokens: int) -> NDArray[np.int32] | None:
        if self.experts is None or not (coded := meta.get("routed_experts")):
            return None
        import numpy as np

        found = np.frombuffer(base64.b64decode(coded), np.int32)
        shape = (tokens - 1, *self.experts)
        if found.size != shape[0] * shape[1] * shape[2]:
            raise EngineError(
                f"engine sglang: routed experts are {found.size} numbers, expected {' x '.join(map(str, shape))} "
                "(tokens but the last, layers, experts of a token)"
            )
        return found.reshape(shape)
