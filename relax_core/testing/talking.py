"""An engine that says what a function tells it to, and keeps what it gave: whoever plays can be compared with it.

talker = Talker(adapter, lambda prompt: "yes" if "sure" in prompt else "no")
...                                              # play a task with it
assert sampled(chat.samples) == talker.given()   # each reply is trained once, behind the tokens that the engine read
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from relax_core.interfaces import Completion, Engine, Interrupt, Request
from relax_core.types import Sample, Stop, Version

if TYPE_CHECKING:
    from relax_core.models.text import TextAdapter
    from relax_core.weights import WeightUpdate

Given = tuple[tuple[int, ...], tuple[int, ...]]
"""What was read, and what was drawn behind it."""


class Talker(Engine):
    """``say`` gets the prompt's text with its special tokens. It may wait; what it raises, the engine raises."""

    def __init__(self, adapter: TextAdapter, say: Callable[[str], str | Awaitable[str]]) -> None:
        super().__init__(None)
        self.adapter, self.say = adapter, say
        self.gave: list[tuple[Request, list[int]]] = []
        """What was asked and answered, in order."""
        self.waiting = 0
        self.lost = 0
        """Requests that were cancelled."""

    async def generate(self, request: Request) -> Completion:
        tokenizer = self.adapter.tokenizer
        text = self.say(str(tokenizer.decode(list(request.prompt.ids), skip_special_tokens=False)))
        self.waiting += 1
        try:
            said = text if isinstance(text, str) else await text
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.lost += 1
            raise
        finally:
            self.waiting -= 1
        ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        most = request.sampling.max_new_tokens
        stop, ids = (Stop.LENGTH, ids[:most]) if len(ids) > most else (Stop.EOS, ids)
        self.gave.append((request, ids))
        return Completion(ids, [-0.5 - 0.01 * i for i in range(len(ids))], [Version(0, 3)] * len(ids), stop)

    def given(self, task: str | None = None) -> list[Given]:
        """Sorted; of one task's plays, or of all."""
        of_task = (found for found in self.gave if task is None or found[0].key.task == task)
        return sorted((tuple(request.prompt.ids), tuple(ids)) for request, ids in of_task)

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}


def sampled(samples: Sequence[Sample]) -> list[Given]:
    """What samples train: each run of sampled tokens, and all tokens before it. Sorted.

    Raises AssertionError where log-probs and versions are not those that Talker gives with such a run.
    """
    found: list[Given] = []
    for sample in samples:
        starts = [i for i, m in enumerate(sample.mask) if m and not (i and sample.mask[i - 1])]
        for start in starts:
            n = next((i for i, m in enumerate(sample.mask[start:]) if not m), len(sample.mask) - start)
            assert sample.logprobs[start : start + n] == [-0.5 - 0.01 * i for i in range(n)]
            assert sample.versions[start : start + n] == [3] * n
            found.append((tuple(sample.ids[:start]), tuple(sample.ids[start : start + n])))
    return sorted(found)
