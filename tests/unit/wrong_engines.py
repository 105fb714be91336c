"""Engines with one fault each, and otherwise the embedded one: what the probe and the checks must refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from relax_core.errors import EngineError, WeightsError
from relax_core.interfaces import Completion, Interrupt, Request
from relax_core.torch.decoder import Decoder
from relax_core.torch.engine import TorchEngine
from relax_core.torch.plain import full_logprobs
from relax_core.types import Stop, Version
from relax_core.weights import WeightUpdate


def decoder_of(e: TorchEngine) -> Decoder:
    assert e.decoder is not None
    return e.decoder


class WrongTemperature(TorchEngine):
    """Samples colder than it was asked to."""

    async def generate(self, request: Request) -> Completion:
        sampling = replace(request.sampling, temperature=request.sampling.temperature * 0.7)
        return await super().generate(replace(request, sampling=sampling))


class Untempered(TorchEngine):
    """Samples at the temperature that it was asked to; its log-probs are those at temperature 1."""

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        model = decoder_of(self).model
        return replace(c, logprobs=full_logprobs(self.setup.adapter, model, request.prompt, c.ids))


class MissingBan(TorchEngine):
    """Does not know the last of the ids that must not be sampled."""

    async def start(self) -> None:
        await super().start()
        decoder_of(self)._banned = decoder_of(self)._banned[:-1]


class NoBan(MissingBan):
    """Knows none of them."""

    async def start(self) -> None:
        await super().start()
        decoder_of(self)._banned = decoder_of(self)._banned[:0]


class Stale(TorchEngine):
    """Says that it has the new weights, and has not."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        decoder_of(self).versions.append(update.manifest.version)


class StaleLater(TorchEngine):
    """Takes weights that are given to it first, and none after them."""

    loads = 0

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        self.loads += 1
        if self.loads > 1:
            decoder_of(self).versions.append(update.manifest.version)
        else:
            await super().load_weights(update, interrupt)


class ForgetsBase(TorchEngine):
    """Takes of the weights only those that move."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        moving = {info.name for info in update.moving}
        decoder_of(self).swap(
            update.manifest.version, [(n, t) for n, t in update.tensors() if n in moving], update.frozen
        )


class StuckVersion(TorchEngine):
    """Its weights move; the version that it says does not."""

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        return replace(c, versions=[Version(0, 0)] * len(c.ids))


class TooNewVersion(TorchEngine):
    """Says of every token the version that it has when the reply is there."""

    exact_versions = False

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        return replace(c, versions=[decoder_of(self).version] * len(c.ids))


class SampledGreedy(TorchEngine):
    """Does not know that temperature 0 is greedy."""

    async def generate(self, request: Request) -> Completion:
        heat = request.sampling.temperature or 1.0
        return await super().generate(replace(request, sampling=replace(request.sampling, temperature=heat)))


class Silent(TorchEngine):
    """Answers nobody."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


class DropsAborted(TorchEngine):
    """Forgets requests that it aborts."""

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        if c.stop is Stop.ABORT:
            await asyncio.Event().wait()
        return c


class EmptyAborts(TorchEngine):
    """Gives nothing of an aborted request, and goes on with it from its start."""

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(replace(request, drawn=0))
        return replace(c, ids=[], logprobs=[], versions=[]) if c.stop is Stop.ABORT else c


class AlwaysAborts(TorchEngine):
    """Whatever interrupt it is asked for."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await super().load_weights(update, "abort")


class NeverInterrupts(TorchEngine):
    """Drains whatever interrupt it is asked for."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await super().load_weights(update, "drain")


class NeverDrains(TorchEngine):
    """Goes on under new weights where it should drain."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        await super().load_weights(update, "continue" if interrupt == "drain" else interrupt)


class Trusting(TorchEngine):
    """Does not say that weights are not as they were published."""

    async def load_weights(self, update: WeightUpdate, interrupt: Interrupt = "continue") -> None:
        with suppress(WeightsError):
            await super().load_weights(update, interrupt)


class Restless(TorchEngine):
    """Goes on when it should pause."""

    async def pause(self) -> None: ...


class Sleepless(TorchEngine):
    """Serves while it should sleep."""

    async def sleep(self) -> None:
        await super().sleep()
        await self.wake()


class ForgetsDrawn(TorchEngine):
    """Counts only new tokens."""

    async def generate(self, request: Request) -> Completion:
        return await super().generate(replace(request, drawn=0))


class NeverEos(TorchEngine):
    """Says that every reply ended at its limit."""

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        return replace(c, stop=Stop.LENGTH) if c.stop is Stop.EOS else c


class Mixing(TorchEngine):
    """Takes the log-probs of one reply for those of another where many are made at once."""

    last: Completion | None = None

    async def generate(self, request: Request) -> Completion:
        c = await super().generate(request)
        other, self.last = self.last, c
        if other is not None and len(other.ids) == len(c.ids) and len(self._futures) > 40:
            return replace(c, logprobs=other.logprobs)
        return c


class Leaking(TorchEngine):
    """Goes on with cancelled requests, and counts them."""

    async def generate(self, request: Request) -> Completion:
        work = asyncio.create_task(super().generate(replace(request, sampling=replace(request.sampling))))
        return await asyncio.shield(work)


class WrongGauge(TorchEngine):
    """``version`` of its gauges stays where it was."""

    async def health(self) -> Mapping[str, float]:
        return {**await super().health(), "version": 0.0}


class NoGauges(TorchEngine):
    """Says nothing of its work."""

    async def health(self) -> Mapping[str, float]:
        await super().health()
        return {}


class QuietEnd(TorchEngine):
    """Gives what it has to requests in flight when it ends, as if nothing were the matter."""

    async def generate(self, request: Request) -> Completion:
        try:
            return await super().generate(request)
        except EngineError:
            return Completion([], [], [], Stop.ABORT)
