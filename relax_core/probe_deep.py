"""The probe of ``relax check --deep``: the run's engine, alone in this process, against the model in memory.

It knows more than a run's own probe: any temperature, and the same weights with noise, which make every model uneven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_core.engine_role import engine_setup
from relax_core.errors import EngineError, RelaxError
from relax_core.probe import FLOAT32, Probe, summary
from relax_core.probe_run import a_prompt, engine_tolerance
from relax_core.types import Version
from relax_core.weights import blank

if TYPE_CHECKING:
    import torch

    from relax_core.interfaces import Engine, ModelAdapter
    from relax_core.run import Run

OTHER = 0.7
"""A temperature beside the run's own; where that is this one, 1."""
NOISE = 0.7
"""Standard deviation of what noise adds to logits: enough to tell temperatures, and little enough for bfloat16."""

LATER = "a run probes its engines by its trainer when it starts"


def engine_problems(run: Run, report: Callable[[str], None]) -> list[str]:
    """One line for each difference; what was tried is reported. The engine is started, asked, and stopped again."""
    from relax_core.run import build_adapter, build_environments

    adapter, media = build_adapter(run)
    prompt = a_prompt(adapter, build_environments(run).values())
    try:
        setup = engine_setup(run, adapter, note=report)
        engine: Engine = run.stack.build("engines", run.config.engine, setup, where="engine")
        temperature = run.config.sampling.temperature
        heats = (temperature, 1.0 if temperature == OTHER else OTHER)
        probe = Probe(engine, adapter, prompt, heats, FLOAT32)
        return asyncio.run(_problems(run, probe, report))
    except RelaxError as error:
        return [f"engine probe: {error}"]
    finally:
        media.release(ref.key for ref in prompt.media)


async def _problems(run: Run, probe: Probe, report: Callable[[str], None]) -> list[str]:
    try:
        await probe.engine.start()
    except EngineError as error:
        if run.config.runtime.id == "local":
            raise
        report(f"engine probe: left out: an engine cannot start on this machine ({error}); {LATER}")
        return []
    try:
        await _probe(run, probe, _model(run, probe.adapter))
    except (MemoryError, RuntimeError) as error:  # torch's out-of-memory error is a RuntimeError
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        report(f"engine probe: left out: the model does not fit beside the engine ({type(error).__name__}); {LATER}")
        return []
    finally:
        await probe.engine.stop()
    if not probe.findings:
        report(summary([probe]))
    return [f"engine probe: {line}" for line in probe.findings]


async def _probe(run: Run, probe: Probe, model: torch.nn.Module) -> None:
    """Blank weights, the model's own, and these with noise, each as a version of its own."""
    from relax_core.torch.optim import named_tensors
    from relax_core.torch.plain import ModelTruth, add_noise
    from relax_core.transports import CopyTransport

    transport, truth = CopyTransport(CopyTransport.Config()), ModelTruth(probe.adapter, model)
    names = ("blank weights", "the model's weights", "the model's weights with noise")
    for number, weights in enumerate(names, 1):
        if number == len(names):
            add_noise(model, run.config.seed, NOISE)
        named = list(named_tensors(model))
        update = transport.publish(Version(0, number), blank(named) if number == 1 else named)
        probe.tolerance, probe.uniform = engine_tolerance(run, update), False
        if not await probe.load(update, weights):
            return
        replies = await probe.ask(update.manifest.version, weights)
        if number == 1:
            probe.compare_blank(replies)
        else:
            await probe.compare(replies, truth)
        if probe.findings:
            return


def _model(run: Run, adapter: ModelAdapter) -> torch.nn.Module:
    """On the engine's device, in the engine's dtype."""
    import torch

    config = run.stack.config("engines", run.config.engine, "engine")
    asked = str(getattr(config, "device", "auto"))
    device = "cuda" if asked == "auto" and torch.cuda.is_available() else asked.replace("auto", "cpu")
    said = getattr(torch, str(getattr(config, "dtype", "auto")), None)
    dtype = said if isinstance(said, torch.dtype) else (torch.float32 if device == "cpu" else torch.bfloat16)
    return adapter.load(device, dtype).eval().requires_grad_(False)
