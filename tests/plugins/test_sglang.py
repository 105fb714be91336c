"""Of the sglang plugin what needs no server: settings, command lines, the gate, answers and metrics as they are."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax_core.errors import EngineError
from relax_core.testing.engines import request
from relax_core.testing.tiny import tiny_adapter
from relax_core.types import Stop
from relax_plugin_sglang.arguments import server_arguments, server_environment
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.folder import model_folder, routing
from relax_plugin_sglang.gate import Gate
from relax_plugin_sglang.gauges import gauges
from relax_plugin_sglang.wire import Wire

# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "found neither of python and url"),
        ({"python": "python", "url": "http://h:1"}, "found both of python and url"),
        ({"url": "http://h:1", "arguments": {"tp_size": 2}, "port": 9}, "port, arguments: only for a server that is"),
        ({"url": "http://h:1", "memory_saver": True}, "memory_saver: only for a server that is started here"),
        ({"python": "python", "key_env": "KEY"}, "key_env: only for the server at a url"),
        ({"python": "python", "arguments": {"enable-metrics": True}}, "arguments.enable-metrics: .* use metrics"),
        ({"python": "python", "arguments": {"model_path": "m"}}, "arguments.model_path: .* use model"),
        ({"python": "python", "device": "cpu", "deterministic": True}, "deterministic: SGLang can be so only on a GPU"),
        ({"url": "ftp://h"}, "pattern"),
        ({"python": "python", "no_such": 1}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        SglangConfig(**settings)


def test_reading_the_settings_imports_nothing_heavy() -> None:
    code = "import sys, relax_plugin_sglang.plugin as p; p.relax_engines(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "sglang", "numpy"} & set(loaded)


def test_a_command_line() -> None:
    config = SglangConfig(
        python=Path("python"),
        routed_experts=True,
        arguments={
            "tp_size": 2,
            "disable_radix_cache": True,
            "sampling_backend": "flashinfer",
            "cuda-graph-bs": [1, 8],
        },
    )
    words = server_arguments(config, Path("/m"), "cuda:1", 4000)
    line = f" {' '.join(words)} "
    for part in (
        "--model-path /m ",
        "--device cuda ",
        "--base-gpu-id 1 ",
        "--port 4000 ",
        "--host 127.0.0.1 ",
        "--skip-tokenizer-init ",
        "--enable-return-routed-experts ",
        "--tp-size 2 ",
        "--disable-radix-cache ",
        "--sampling-backend flashinfer ",
        "--cuda-graph-bs 1 8 ",
    ):
        assert f" {part}" in line, part
    assert "memory-saver" not in line and "torch_native" not in line
    assert "api-key" not in line, "a command line can be read by every user of the machine"


def test_a_flag_that_the_engine_would_set_can_be_left_out() -> None:
    config = SglangConfig(python=Path("python"), device="cpu", arguments={"disable_overlap_schedule": False})
    words = server_arguments(config, Path("/m"), "cpu", 4000)
    assert "--disable-overlap-schedule" not in words and "--disable-cuda-graph" in words


def test_an_environment() -> None:
    config = SglangConfig(python=Path("python"), threads=3, environment={"A": "2"})
    base = {"PYTHONPATH": "ours", "A": "1", "PATH": "p", "CUDA_VISIBLE_DEVICES": "0"}
    found = server_environment(config, "cpu", Path("/t"), base)
    assert not any("EXTERNAL" in name for name in found)
    assert any("EXTERNAL" in name for name in server_environment(config, "cpu", Path("/t"), base, media=True))
    assert "PYTHONPATH" not in found
    assert (found["A"], found["PATH"], found["TMPDIR"], found["OMP_NUM_THREADS"]) == ("2", "p", "/t", "3")
    assert found["SGLANG_USE_CPU_ENGINE"] == "1" and found["CUDA_VISIBLE_DEVICES"] == ""
    assert server_environment(config, "cuda", Path("/t"), base)["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_model_folder(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    made = model_folder(SglangConfig(python=Path("python")), adapter, tmp_path)
    assert made == (tmp_path / "model").resolve() and (made / "model.safetensors").is_file()
    assert model_folder(SglangConfig(python=Path("p"), model=made), adapter, tmp_path / "x") == made
    with pytest.raises(EngineError, match=r"engine\.model: .*nothing has no config\.json"):
        model_folder(SglangConfig(python=Path("p"), model=tmp_path / "nothing"), adapter, tmp_path / "x")
    with pytest.raises(EngineError, match="a qwen3 model has no experts; leave it out"):
        routing(made)


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_who_waits_passes_in_order_as_room_and_reasons_allow() -> None:
    async def main() -> None:
        gate, passed = Gate(2), []

        async def one(order: int) -> None:
            await gate.enter((order,))
            passed.append(order)

        gate.shut("a")
        gate.shut("b")
        tasks = [asyncio.create_task(one(order)) for order in (3, 1, 2, 0)]
        await asyncio.sleep(0)
        gate.open("a")
        await asyncio.sleep(0)
        assert (gate.waiting, gate.inside, passed) == (4, 0, [])
        tasks[-1].cancel()  # it waited, and goes
        await asyncio.sleep(0)
        gate.open("b")
        await asyncio.sleep(0)
        assert (gate.waiting, gate.inside, sorted(passed)) == (1, 2, [1, 2])
        gate.leave()
        await asyncio.sleep(0)
        assert passed[-1] == 3 and gate.inside == 2
        gate.leave()
        gate.leave()
        await gate.empty()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_who_is_cancelled_as_it_is_let_in_keeps_nobody_out() -> None:
    async def main() -> None:
        gate = Gate(1)
        await gate.enter()
        second, third = asyncio.create_task(gate.enter()), asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        gate.leave()  # lets the second in, which is cancelled before it runs
        second.cancel()
        await asyncio.wait_for(third, 5)
        assert gate.inside == 1

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_broken_gate_lets_nobody_wait() -> None:
    async def main() -> None:
        gate = Gate(1)
        await gate.enter()
        waiting, emptied = asyncio.create_task(gate.enter()), asyncio.create_task(gate.empty())
        await asyncio.sleep(0)
        gate.fail("it died")
        for work in (waiting, emptied, gate.enter(), gate.empty()):
            with pytest.raises(EngineError, match="it died"):
                await work

    asyncio.run(asyncio.wait_for(main(), 10))


# --- the wire ---------------------------------------------------------------------------------------------------------

WIRE = Wire(frozenset({1}), {"0": -1e9}, experts=(2, 2))


def found(ids: list[int], reason: dict[str, Any], **meta: Any) -> dict[str, Any]:
    pairs = [[-0.5, i, None] for i in ids]
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": pairs, **meta}}


def test_what_a_request_asks_for() -> None:
    body = Wire.of(tiny_adapter(), None, None).body(request("r", [4, 5], 8, temperature=0.5), "id", "salt")
    assert body == {
        "input_ids": [4, 5],
        "rid": "id",
        "sampling_params": {
            "max_new_tokens": 8,
            "temperature": 0.5,
            "stop_token_ids": [1],
            "logit_bias": {"0": -1e9, "2": -1e9},
        },
        "return_logprob": True,
        "extra_key": "salt",
    }


def test_an_evaluation_may_cut_the_distribution_and_seeds_are_the_plays() -> None:
    wire = Wire.of(tiny_adapter(), 3, None)
    bodies = [wire.body(request(name, [4], top_p=0.9, top_k=5), "", "") for name in ("a", "a", "b")]
    parameters = [body["sampling_params"] for body in bodies]
    assert parameters[0]["top_p"] == 0.9 and parameters[0]["top_k"] == 5
    seeds = [each["sampling_seed"] for each in parameters]
    assert seeds[0] == seeds[1] != seeds[2] and all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize(
    ("ids", "reason", "stop"),
    [
        ([5, 1], {"type": "stop", "matched": 1}, Stop.EOS),
        ([5, 6], {"type": "length", "length": 2}, Stop.LENGTH),
        ([5, 1], {"type": "length", "length": 2}, Stop.EOS),
        ([5], {"type": "abort", "message": "m"}, Stop.ABORT),
        ([], {"type": "abort", "message": "m"}, Stop.ABORT),
        ([5, 9], {"type": "stop", "matched": 9}, None),
    ],
)
def test_why_an_answer_ended(ids: list[int], reason: dict[str, Any], stop: Stop | None) -> None:
    answer = WIRE.answer(found(ids, reason), 3)
    assert (answer.ids, answer.logprobs, answer.stop) == (ids, [-0.5] * len(ids), stop)


def test_answers_that_are_no_samples_are_refused() -> None:
    with pytest.raises(EngineError, match=r"ended a request by .*NaN happened"):
        WIRE.answer(found([5], {"type": "stop", "matched": "NaN happened"}), 3)
    wrong = found([5], {"type": "length"})
    wrong["meta_info"]["output_token_logprobs"] = []
    with pytest.raises(EngineError, match="1 tokens and 0 log-probs"):
        WIRE.answer(wrong, 3)
    with pytest.raises(EngineError, match="1 tokens and 1 log-probs"):
        WIRE.answer(found([5], {"type": "length"}, output_token_logprobs=[[None, 5, None]]), 3)
    assert WIRE.answer(found([5], {"type": "length"}, prompt_tokens=3), 3).ids == [5]
    with pytest.raises(EngineError, match="the server read 4 tokens of a prompt of 3"):
        WIRE.answer(found([5], {"type": "length"}, prompt_tokens=4), 3)


def test_routed_experts_have_the_models_shape() -> None:
    numbers = np.arange(4 * 2 * 2, dtype=np.int32)  # 3 tokens of the prompt and 2 new ones, but the last
    coded = base64.b64encode(numbers.tobytes()).decode()
    answer = WIRE.answer(found([5, 6], {"type": "length"}, routed_experts=coded), 3)
    assert answer.experts is not None and np.array_equal(answer.experts, numbers.reshape(4, 2, 2))
    with pytest.raises(EngineError, match="routed experts are 16 numbers, expected 3 x 2 x 2"):
        WIRE.answer(found([5, 6], {"type": "length"}, routed_experts=coded), 2)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_gauges_and_counters_are_read_and_histograms_left_out() -> None:
    text = """\
# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model="a b",rank="0"} 3.0
sglang:num_running_reqs{model="a b",rank="1"} 4.0
# TYPE sglang:time_seconds histogram
sglang:time_seconds_bucket{le="+Inf"} 7.0
sglang:time_seconds_sum{x="y"} 7.5
# TYPE sglang:tokens_total counter
sglang:tokens_total 12.0
# TYPE sglang:odd gauge
sglang:odd NaN
# TYPE python_info gauge
python_info 1.0
"""
    assert gauges(text) == {"num_running_reqs": 7.0, "tokens_total": 12.0}
