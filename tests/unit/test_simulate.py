"""The simulated cluster: virtual time, the simulated engine, what the benchmark concludes, and one small run of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulate, simulate_run
from benchmarks.simulate_costs import RECORDED, Costs, line, response_length, tool_seconds
from benchmarks.simulate_parts import Meter, SimulatedEngine, SimulatedTrainer
from benchmarks.simulate_run import LIMIT, Setting
from relax_core.interfaces import Request
from relax_core.testing.engines import request
from relax_core.testing.virtual_time import StoodStill, virtually
from relax_core.types import Stop, Version
from relax_core.weights import Manifest, WeightUpdate

pytestmark = pytest.mark.timeout(120)

COSTS = Costs(step_s=1.0, row_s=0.5, prefill_s=0.25, cut_s=0.0, train_s=1.0, publish_s=0.0, load_s=10.0)


# --- virtual time -----------------------------------------------------------------------------------------------------


def test_waiting_takes_no_time_and_ends_in_order() -> None:
    ended: list[int] = []

    async def wait(hours: int) -> float:
        await asyncio.sleep(3600 * hours)
        ended.append(hours)
        return asyncio.get_running_loop().time()

    async def main() -> tuple[list[float], str]:
        times = await asyncio.gather(*(wait(hours) for hours in (3, 1, 2)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        return [*times, asyncio.get_running_loop().time()], await asyncio.to_thread(lambda: "done")

    assert virtually(main()) == ([10_800, 3600, 7200, 10_805], "done")
    assert ended == [1, 2, 3]


def test_what_would_wait_for_ever_is_an_error_and_executors_pass_errors_on() -> None:
    async def fails() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(StoodStill, match="no timer"):
        virtually(asyncio.wait_for(asyncio.Event().wait(), None))
    with pytest.raises(ValueError, match="invalid literal"):
        virtually(fails())


# --- distributions and costs ------------------------------------------------------------------------------------------


def test_lengths_and_latencies_fall_as_stated() -> None:
    quantiles = [(i + 0.5) / 10_000 for i in range(10_000)]
    lengths = [response_length(u, 1000) for u in quantiles]
    assert sorted(lengths)[5000] == pytest.approx(150, abs=1)
    assert sum(n == 1000 for n in lengths) / 10_000 == pytest.approx(0.05, abs=0.002)
    assert tool_seconds(0.5) == pytest.approx(0.05) and tool_seconds(0.99) == pytest.approx(1.0)


def test_a_line_has_no_negative_part() -> None:
    assert line([(0, 1.0), (2, 2.0)]) == pytest.approx((1.0, 0.5))
    assert line([(1, 1.0), (2, 0.0)])[1] == 0.0


# --- the simulated engine ---------------------------------------------------------------------------------------------


class Fixed(SimulatedEngine):
    """Replies of the full length."""

    async def generate(self, request: Request) -> Any:
        done = await super().generate(request)
        return asyncio.get_running_loop().time(), done


def engine(monkeypatch: pytest.MonkeyPatch, slots: int = 8) -> Fixed:
    monkeypatch.setattr("benchmarks.simulate_parts.response_length", lambda u, limit: limit)
    return Fixed(COSTS, slots, 0, Meter())


def weights(number: int) -> WeightUpdate:
    return WeightUpdate(Manifest(Version(0, number), ()), None)  # type: ignore[arg-type]


def test_rows_are_decoded_together_and_slow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        e = engine(monkeypatch)
        short, long = await asyncio.gather(*(e.generate(request(f"t{n}", [1] * 4, n, order=(n,))) for n in (4, 10)))
        # 8 tokens of prompts, 4 steps of both rows at 2 s, then 6 of one row at 1.5 s.
        assert (short[0], long[0]) == (pytest.approx(10), pytest.approx(19))
        assert len(short[1].ids) == 4 and short[1].stop is Stop.LENGTH
        assert e.busy_s == pytest.approx(19)

    virtually(main())


def test_a_full_engine_lets_the_rest_wait_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        e = engine(monkeypatch, slots=1)
        calls = [e.generate(request(f"t{i}", [], 2, order=(order,))) for i, order in enumerate((2, 1, 0))]
        ends = [end for end, _ in await asyncio.gather(*calls)]
        assert ends == [pytest.approx(9), pytest.approx(6), pytest.approx(3)]

    virtually(main())


def test_weights_stop_decoding_and_each_token_has_the_version_that_drew_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        e = engine(monkeypatch)
        playing = asyncio.create_task(e.generate(request("t", [], 4)))
        await asyncio.sleep(3.0)
        await e.load_weights(weights(7))
        await e.sleep()
        await asyncio.sleep(100)
        await e.wake()
        end, done = await playing
        assert end == pytest.approx(116)
        assert [v.number for v in done.versions] == [0, 0, 7, 7]
        assert e.busy_s == pytest.approx(6)

    virtually(main())


# --- runs -------------------------------------------------------------------------------------------------------------

SMALL = Setting(engines=4, ranks=4, placement="separate", staleness=1, groups_per_step=4, warmup=2, measured=6)


def simulated(s: Setting) -> dict[str, Any]:
    found = simulate_run.simulate(s, RECORDED)
    return {k: v for k, v in found.items() if not k.endswith("_per_row")}


def test_a_run_repeats_and_more_staleness_is_faster() -> None:
    once, again, sync = simulated(SMALL), simulated(SMALL), simulated(SMALL.changed(staleness=0))
    assert once == again
    assert once["rows"] == 6 * 4 * 8 and set(once["lags"]) <= {"0", "1"}
    assert once["steps_per_h"] > 1.2 * sync["steps_per_h"] and set(sync["lags"]) == {"0"}
    assert 0 < once["engine_idle"] < sync["engine_idle"] < 1
    assert 0.1 * LIMIT < once["length_trained"] < 0.5 * LIMIT


def test_colocated_engines_and_ranks_never_compute_at_once() -> None:
    found = simulated(SMALL.changed(placement="colocate"))
    busy = (1 - found["engine_idle"]) + (1 - found["trainer_wait"])
    assert 0.3 < busy <= 1.0


def test_control_holds_neither_the_simulated_parts_nor_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: SimulatedTrainer, step: int, rows: Any) -> float:
        until = sum(1 for _ in range(3_000_000))
        return seen(self, step, rows) + 0 * until

    seen = SimulatedTrainer._seen
    before = simulate_run.simulate(SMALL, RECORDED)
    monkeypatch.setattr(SimulatedTrainer, "_seen", slow)
    after = simulate_run.simulate(SMALL, RECORDED)
    added = after["elsewhere_us_per_row"]["trainer"] - before["elsewhere_us_per_row"]["trainer"]
    assert added > 1000
    assert after["control_us_per_row"] < before["control_us_per_row"] + added / 2
    assert before["elsewhere_us_per_row"].keys() >= {"engine", "trainer", "files", "watch"}


# --- conclusions ------------------------------------------------------------------------------------------------------


def result(placement: str, staleness: int, engines: int, **values: Any) -> dict[str, Any]:
    setting = {"placement": placement, "staleness": staleness, "engines": engines, "tools": 0}
    return {"setting": setting, **values}


def test_growth_compares_the_most_engines_with_the_fewest() -> None:
    found = [result("separate", s, e, control_us_per_row=c) for s, e, c in ((0, 8, 100), (0, 64, 120), (2, 8, 100))]
    found += [result("separate", 2, 64, control_us_per_row=200.0)]
    judged = simulate.growth(found)
    assert judged["ratios"] == {"separate 0": 1.2, "separate 2": 2.0}
    assert judged["over_least"] == pytest.approx(1.6)
    assert judged["median"] == pytest.approx(1.6) and not judged["reached"]


def test_ranking_allows_noise_and_nothing_more() -> None:
    def of(*speeds: float) -> dict[str, Any]:
        return simulate.ranking([result("colocate", s, 1, steps_per_h=v) for s, v in enumerate(speeds)])

    assert of(10, 20, 19.9) == {"fastest_first": {"colocate tools 0": [1, 2, 0]}, "reached": True}
    assert not of(10, 20, 19)["reached"]


def test_quarters_leave_out_the_ends_and_want_the_accounts_right() -> None:
    groups = {"issued": 10, "trained": 6, "filtered": 3, "failed": 1, "dropped": 0, "in_flight": 0}
    ends = [50.0, *(50.0 + i for i in range(1, 10)), 99.0]
    whole = result("separate", 0, 8, step_ends_s=ends, groups=groups, max_lag=0)
    found = simulate.quarters([whole, whole])
    assert (found["first_s"], found["last_s"], found["reached"]) == (4.0, 4.0, True)
    assert not simulate.quarters([whole, whole | {"groups": groups | {"failed": 2}}])["reached"]
    assert not simulate.quarters([whole | {"max_lag": 1}])["reached"]
    slower = [end + max(0, i - 7) for i, end in enumerate(ends)]
    assert not simulate.quarters([whole | {"step_ends_s": slower}])["reached"]


def test_the_script_runs_and_writes_everything(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script = Path(simulate.__file__)
    words = [sys.executable, str(script), "--quick", "--json", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {r["setting"]["engines"] for r in found["scale"]} == {8, 32}
    assert all(r["control_us_per_row"] > 0 for r in found["scale"])
    assert found["ranking"]["reached"], found["ranking"]
    (q,) = found["quarters"]
    assert q["accounted"] and q["max_lag"] <= 1 and q["ratio"] == pytest.approx(1, abs=0.3), q
    assert q["shares"]["filtered"] == pytest.approx(0.3, abs=0.06)
    assert found["costs"]["step_s"] == RECORDED.step_s and found["costs"]["how"]
    assert "control a row grows" in done.stdout and "64 rows a step on two devices" in done.stdout
