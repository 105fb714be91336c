"""The engine on a real server, which all tests share: the conformance kit, biases, experts, stops, the prefix cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from relax_core.errors import EngineError
from relax_core.setup import EngineSetup
from relax_core.testing import check_engine
from relax_core.testing.engines import request
from relax_core.torch.plain import full_logprobs
from relax_core.transports import SharedTransport
from relax_core.types import Stop, Version
from relax_plugin_sglang.client import Client
from relax_plugin_sglang.engine import SglangEngine
from relax_plugin_sglang.release import Release
from relax_plugin_sglang.weights import BEGIN
from relax_plugin_sglang.wire import BANNED, Wire


def serving(served: Any, test: Callable[[SglangEngine], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        engine = SglangEngine(served.config(**settings), EngineSetup(served.adapter, 3, False))
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("interrupt", ["in_place", "retract"])
def test_it_keeps_the_promises_of_an_engine_with_a_qwen3(dense: Any, interrupt: Any) -> None:
    check_engine(
        lambda setup: SglangEngine(dense.config(interrupt=interrupt), setup),
        adapter=dense.adapter,
        limit_s=120,
        long=1024,
    )


def test_it_keeps_the_promises_of_an_engine_with_a_qwen3_moe(moe: Any) -> None:
    check_engine(lambda setup: SglangEngine(moe.config(), setup), adapter=moe.adapter, limit_s=120, long=1024)


def test_new_weights_are_copied_at_once(dense: Any, moe: Any) -> None:
    """And not by their names, which the server's log would say."""
    transport = SharedTransport(SharedTransport.Config())

    async def test(engine: SglangEngine) -> None:
        adapter = engine.setup.adapter
        model = adapter.load("cpu", torch.float32)
        for number in range(1, 4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            await engine.load_weights(transport.publish(Version(7, number), model.named_parameters()))
            reply = await engine.generate(request(f"at-once-{number}", [4, 5, 6], 8))
            wanted = full_logprobs(adapter, model, request("", [4, 5, 6]).prompt, reply.ids)
            assert max(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True)) < 1e-3

    for served in (dense, moe):
        serving(served, test)
        assert "relax: each update" not in served.log.read_text()
    transport.close()


def test_requests_with_biases_of_their_own_share_a_batch(dense: Any) -> None:
    """The launcher's repair makes the biases of a batch at once: each request must get its own, and none where none."""

    async def main() -> list[Any]:
        client = Client(dense.url, os.environ[dense.key_env])
        try:
            return await asyncio.gather(*(client.generate(_body(bias)) for bias in biases))
        finally:
            await client.close()

    def _body(bias: dict[str, float]) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
        parameters |= {"logit_bias": bias} if bias else {}
        return {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True, "extra_key": "biases"}

    prompt = [4, 5, 6]
    biases: list[dict[str, float]] = [{str(i): 50.0} if i % 2 else {} for i in range(3, 19)]
    found = asyncio.run(asyncio.wait_for(main(), 60))
    for bias, answer in zip(biases, found, strict=True):
        ((logprob, token, _),) = answer["meta_info"]["output_token_logprobs"]
        if bias:
            assert [str(token)] == list(bias) and logprob > -1e-6
        else:
            assert logprob < -1e-3, "a request without a bias got another one's"


def test_a_reply_ends_only_at_our_stop_ids(dense: Any) -> None:
    """The model's own end of text is a token like others where the adapter does not stop at it."""

    async def test(engine: SglangEngine) -> None:
        life = engine.alive()
        life.wire = type(life.wire)(frozenset({7}), life.wire.bias)
        replies = await asyncio.gather(*(engine.generate(request(f"stops-{i}", [4, 5], 60)) for i in range(32)))
        assert {r.stop for r in replies} <= {Stop.EOS, Stop.LENGTH}
        assert any(1 in r.ids[:-1] for r in replies), "no reply went on after the model's own end"
        for reply in replies:
            assert (reply.ids[-1] == 7) == (reply.stop is Stop.EOS) and 7 not in reply.ids[:-1]
            assert len(reply.ids) == 60 or reply.stop is Stop.EOS
        model = dense.adapter.load("cpu", torch.float32)
        longest = max(replies, key=lambda r: len(r.ids))
        wanted = full_logprobs(dense.adapter, model, request("", [4, 5]).prompt, longest.ids)
        assert max(abs(a - b) for a, b in zip(wanted, longest.logprobs, strict=True)) < 1e-3

    serving(dense, test)


def test_the_experts_of_every_token_come_back(moe: Any) -> None:
    """Those that transformers' own routers choose, at each position but the last."""

    async def test(engine: SglangEngine) -> None:
        asked = request("experts", [4, 9, 14, 19], 12)
        reply = await engine.generate(asked)
        found = reply.extras["routed_experts"]
        row = [*asked.prompt.ids, *reply.ids]
        assert found.shape == (len(row) - 1, 2, 2)
        model = moe.adapter.load("cpu", torch.float32)
        with torch.no_grad():
            routers = model(torch.tensor([row]), output_router_logits=True).router_logits
        wanted = torch.stack([logits.topk(2, dim=-1).indices for logits in routers], dim=1)[:-1]
        assert torch.equal(torch.from_numpy(found.copy()).sort(-1).values, wanted.int().sort(-1).values)

    serving(moe, test, routed_experts=True)


def test_a_server_without_what_the_settings_need_is_refused(dense: Any) -> None:
    with pytest.raises(EngineError, match="was started without --enable-deterministic-inference: add it"):
        serving(dense, lambda engine: asyncio.sleep(0), deterministic=True)
    with pytest.raises(EngineError, match="a qwen3 model has no experts; leave it out"):
        serving(dense, lambda engine: asyncio.sleep(0), routed_experts=True)


def test_the_servers_words_are_in_the_error(dense: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        with pytest.raises(EngineError, match=r"the server says: .*longer than the model's context length"):
            await engine.generate(request("long", [4] * 3000, 8))
        assert (await engine.generate(request("short", [4], 1))).ids

    serving(dense, test)


def test_prefixes_are_shared_within_a_version_and_never_across(dense: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        cached = []
        for version in ((0, 500), (0, 500), (1, 500)):
            life, asked = engine.alive(), request("prefix", [5 + i % 20 for i in range(64)], 1)
            found = await life.client.generate(life.wire.body(asked, life.rid(), life.salt(Version(*version))))
            cached.append(found["meta_info"]["cached_tokens"])
        assert cached == [0, 63, 0]

    serving(dense, test)


def test_the_servers_metrics_are_among_the_gauges(dense: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        before = await engine.health()
        await engine.generate(request("gauges", [4, 5, 6], 5))
        after = await engine.health()
        key = "server/num_requests_total"
        assert after[key] >= before[key] + 1 and after["server/max_total_num_tokens"] == 16384
        assert (after["running"], after["waiting"], after["requests"]) == (0, 0, 1)

    serving(dense, test)


def test_asleep_it_gives_up_its_weights_and_serves_when_it_has_new_ones(dense: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        # The server's routes are the same without the memory saver, which needs a GPU; a server elsewhere is not asked.
        engine.config = engine.config.model_copy(update={"memory_saver": True})
        life, wire = engine.alive(), engine.alive().wire
        life.wire = Wire(frozenset(), {**wire.bias, **{str(i): BANNED for i in wire.stop_ids}})  # none ends by itself
        running = [asyncio.create_task(engine.generate(request(f"s-{i}", [4, i + 5], 1900))) for i in range(8)]
        while (await engine.health())["running"] < 8:
            await asyncio.sleep(0.01)
        await engine.sleep()
        back = await asyncio.gather(*running)
        assert {reply.stop for reply in back} == {Stop.ABORT}
        life.wire = wire
        late = asyncio.create_task(engine.generate(request("late", [4, 5, 6], 8)))
        await engine.wake()
        await asyncio.sleep(0.3)
        assert not late.done(), "a request was answered before there were weights"
        model = dense.adapter.load("cpu", torch.float32)
        transport = SharedTransport(SharedTransport.Config())
        named = [(name, parameter.detach() * 1.5) for name, parameter in model.named_parameters()]
        await engine.load_weights(transport.publish(Version(0, 3), named))
        reply = await late
        transport.close()
        with torch.no_grad():
            for (_, parameter), (_, new) in zip(model.named_parameters(), named, strict=True):
                parameter.copy_(new)
        wanted = full_logprobs(dense.adapter, model, request("", [4, 5, 6]).prompt, reply.ids)
        assert max(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True)) < 1e-3
        assert set(reply.versions) == {Version(0, 3)}

    serving(dense, test)


def test_what_a_killed_run_left_in_a_server_elsewhere_is_ended(dense: Any, release: Release) -> None:
    """It was frozen, and where weights go in a session, one was open."""

    async def leave() -> None:
        client = Client(dense.url, os.environ[dense.key_env])
        await client.post("/pause_generation", {"mode": "in_place"})
        if release.sessions:
            await client.post(BEGIN, {})
        await client.close()

    async def test(engine: SglangEngine) -> None:
        model = dense.adapter.load("cpu", torch.float32)
        transport = SharedTransport(SharedTransport.Config())
        await engine.load_weights(transport.publish(Version(0, 4), list(model.named_parameters())))
        transport.close()
        assert (await engine.generate(request("after", [4, 5, 6], 8))).versions[0] == Version(0, 4)

    asyncio.run(leave())
    serving(dense, test)


def test_a_cancelled_request_leaves_the_server(dense: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(request(f"c-{i}", [4], 1900))) for i in range(4)]
        while (await engine.health())["server/num_running_reqs"] == 0 and not all(t.done() for t in tasks):
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        life = engine.alive()
        await asyncio.wait_for(life.idle(), 20)

    serving(dense, test)
