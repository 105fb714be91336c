"""The conformance checks of engines: the embedded ones pass, and each of many faults is refused with what is wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from relax_core.remote.process import ProcessEngine
from relax_core.testing import check_engine, engine_checks
from relax_core.testing.engines import TinyBuilder
from relax_core.testing.tiny import tiny_adapter
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine
from tests.unit import wrong_engines

pytestmark = pytest.mark.timeout(110)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_engine(dtype: Any) -> None:
    """In a batch of few rows, so that requests wait, and with prompts that have images."""
    config = EngineConfig(device="cpu", dtype=dtype, max_rows=24)
    check_engine(lambda setup: TorchEngine(config, setup), adapter=tiny_adapter(images=True), dtype=dtype)


@pytest.mark.slow
def test_the_embedded_engine_in_a_process_of_its_own() -> None:
    def kill(e: ProcessEngine) -> None:
        assert e.pid is not None
        os.kill(e.pid, signal.SIGKILL)

    builder = TinyBuilder({"images": True}, {"max_rows": 24})
    adapter = tiny_adapter(images=True)
    check_engine(lambda setup: ProcessEngine(builder, setup.adapter.media), adapter=adapter, kill=kill)


NUMBER = r"-?\d+\.\d{4}"
APART = rf"has {NUMBER}, the model in memory {NUMBER}: {NUMBER} apart \(float32 allows 0.001\)"
LIMIT_S = {"Silent": 1.0, "DropsAborted": 3.0}
"""Of engines that never answer; the others have more than a busy machine needs."""
FAULTS = {
    "WrongTemperature": rf"^check_logprobs: log-probs at temperature 1 .*{APART}",
    "Untempered": rf"^check_logprobs: log-probs at temperature 0.7 .*{APART}",
    "MissingBan": rf"^check_greedy: .*({APART}|banned ids \[2\] were drawn)",
    "Stale": rf"^check_greedy: .*{APART}",
    "StaleLater": rf"^check_versions: log-probs at .* under weights 'b': .*{APART}",
    "NoBan": r"^check_bans: (banned ids \[.*\] were drawn|blank weights: id \d+ has log-prob -\d.\d{6}, but 30 of 32)",
    "ForgetsBase": rf"^check_frozen: log-probs at .* under weights 'a': .*{APART}",
    "StuckVersion": r"^check_greedy: versions \[\(0, 0\)\]: all tokens were drawn by \(0, 1\)",
    "TooNewVersion": r"^check_continue: continue: \d+ tokens say version .*, but only the last \d+ were drawn by it",
    "SampledGreedy": r"^check_greedy: greedy token \d+ \(id \d+\) is not the most likely one",
    "Silent": r"^check_greedy: 6 requests: nothing within 1 s",
    "DropsAborted": r"^check_abort: a running request \(abort\): nothing within 3 s",
    "AlwaysAborts": r"^check_continue: continue: a running request ended by abort with \d+ of 96 tokens",
    "NeverInterrupts": r"^check_continue: continue: all 96 tokens of a running request were drawn by the old weights",
    "NeverDrains": r"^check_drain: .*under weights 'a'",
    "Trusting": r"^check_refused: load_weights took a tensor with a wrong checksum; it must verify first",
    "Restless": r"^check_pause: a request that came while the engine was paused was answered before resume",
    "Sleepless": r"^check_sleep: sleep: a request was answered by a sleeping engine",
    "ForgetsDrawn": r"^check_limits: (12 new tokens: at most 7|.*12 came)",
    "NeverEos": r"^check_limits: stop is length, but it ends with 1: eos",
    "Mixing": rf"^check_concurrency: .*{APART}",
    "Leaking": r"^check_cancel: a cancelled request was at work until \d of 2 others had ended",
    "NoGauges": r"^check_gauges: health\(\) has \[\]; it has at least \['running', 'version', 'waiting'\]",
    "WrongGauge": r"^check_gauges: version is 0, loaded was \d+",
    "QuietEnd": r"^check_stop: 3 of 3 requests in flight when it was stopped got no EngineError: 0 tokens, abort",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_what_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check that is for it; those before it would only take time."""
    kind, name = getattr(wrong_engines, fault), FAULTS[fault][1:].partition(":")[0]
    monkeypatch.setattr(engine_checks, "CHECKS", (getattr(engine_checks, name),))
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_engine(lambda setup: kind(EngineConfig(device="cpu"), setup), limit_s=LIMIT_S.get(fault, 30.0), long=96)


def test_every_check_has_its_faults() -> None:
    """But that of media, which the model in memory reads as well."""
    names = {pattern[1:].partition(":")[0] for pattern in FAULTS.values()}
    without = {check.__name__ for check in engine_checks.CHECKS} - names
    assert without == {"check_media"}


def test_what_an_engine_lacks_is_not_checked_if_it_says_so() -> None:
    with pytest.raises(ValueError, match="'weights'"):
        check_engine(lambda setup: TorchEngine(EngineConfig(), setup), lacks=["weights"])
