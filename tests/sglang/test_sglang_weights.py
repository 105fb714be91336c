"""Every way of weights into a real server: afterwards it computes with them, in bfloat16's and fused tensors' terms."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from relax_core.errors import EngineError, WeightsError
from relax_core.models import hf
from relax_core.models.words import word_tokenizer
from relax_core.torch.optim import named_tensors
from relax_core.transports.snapshot import described
from relax_core.weights import offsets, views
from relax_plugin_sglang.client import Client
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.names import Checkpoint
from relax_plugin_sglang.readback import Readback
from relax_plugin_sglang.release import Release
from relax_plugin_sglang.server import Server
from relax_plugin_sglang.weights import FilesSender, IpcSender, Sender
from relax_plugin_sglang.weights_group import GroupSender

Named = list[tuple[str, torch.Tensor]]
IDS = [4, 9, 17, 8, 23, 11, 30, 6, 12, 25]
WAYS: list[Callable[..., Sender]] = [IpcSender, GroupSender, FilesSender, GroupSender]


def received(model: torch.nn.Module) -> Named:
    """As a ``Receiver`` gives them: views of one buffer."""
    named = list(named_tensors(model))
    infos = described(named)
    starts = offsets(infos)
    buffer = torch.zeros(starts[-1], dtype=torch.uint8)
    found = list(zip((i.name for i in infos), views(buffer, infos, starts), strict=True))
    for (_, target), (_, tensor) in zip(found, named, strict=True):
        target.copy_(tensor)
    return found


def changed(folder: Path, seed: int) -> torch.nn.Module:
    """The folder's model with other weights, all of them."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with hf.seeded(seed), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                1 + 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else torch.randn_like(parameter) * 0.2
            )
    return model


def expected(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logprobs = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    chosen: torch.Tensor = logprobs[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])]
    return chosen


async def served(client: Client) -> torch.Tensor:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    meta = (await client.generate(body))["meta_info"]
    return torch.tensor([pair[0] for pair in meta["input_token_logprobs"][1:]])


async def serves(client: Client, model: torch.nn.Module) -> bool:
    found, wanted = await served(client), expected(model)
    assert wanted.std() > 0.3  # else any weights would do
    return bool((found - wanted).abs().max() < 0.01)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama: SGLang shows its weights."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = word_tokenizer([f"w{i:02d}" for i in range(29)])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with hf.seeded(0):
        hf.save_pretrained(LlamaForCausalLM(config), tokenizer, folder)
    return folder


@pytest.fixture(scope="module", params=["moe", "llama"])
def folder(request: pytest.FixtureRequest, moe_folder: Path, llama_folder: Path) -> Path:
    return {"moe": moe_folder, "llama": llama_folder}[request.param]


@asynccontextmanager
async def started(python: Path, folder: Path, log: Path, **settings: Any) -> AsyncIterator[tuple[Server, Client]]:
    server = Server(SglangConfig(python=python, device="cpu", dtype="float32", **settings), folder, "cpu", log)
    client = Client(server.url, server.key)
    await server.start(client)
    try:
        yield server, client
    finally:
        await client.close()
        await server.stop()


def test_each_way_brings_all_weights_into_the_server(
    python: Path, release: Release, folder: Path, tmp_path: Path
) -> None:
    """Experts and query, key, value are fused in the server, a tied head has no weights of its own."""

    async def main() -> None:
        checkpoint = Checkpoint.of(folder)
        async with started(python, folder, tmp_path / "log") as (_, client):
            for seed, kind in enumerate(WAYS, 1):
                readback = Readback(client, 5)
                sender = kind(client, checkpoint, readback, sessions=release.sessions)
                model = changed(folder, seed)
                assert not await serves(client, model)
                await sender.send(received(model), f"0.{seed}")
                assert await serves(client, model), kind
                again = changed(folder, seed + 10)
                await sender.send(received(again), f"0.{seed + 10}")
                assert await serves(client, again), kind
                assert readback.works is checkpoint.tied  # of a Llama, not of a mixture of experts
                if checkpoint.tied:
                    with pytest.raises(WeightsError, match=r"after the update the server has .* was sent"):
                        await readback.check(received(model), "stale")
                assert (await client.get("/model_info"))["weight_version"] == f"0.{seed + 10}"
                await sender.close()

    asyncio.run(main())


def test_each_way_brings_its_share_to_every_rank_of_a_server(
    python: Path, release: Release, llama_folder: Path, tmp_path: Path
) -> None:
    """Tensor parallel: two processes with half of the heads each, on a core of their own as SGLang wants it."""

    async def main() -> None:
        cores = sorted(os.sched_getaffinity(0))
        two: dict[str, Any] = {
            "arguments": {"tp_size": 2},
            "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in (cores * 2)[:2])},
        }
        checkpoint = Checkpoint.of(llama_folder)
        async with started(python, llama_folder, tmp_path / "log", **two) as (_, client):
            assert (await client.get("/server_info"))["tp_size"] == 2
            for seed, kind in enumerate(WAYS[:3], 1):
                readback, model = Readback(client, 5), changed(llama_folder, seed)
                sender = kind(client, checkpoint, readback, 2, release.sessions)
                assert not await serves(client, model)
                await sender.send(received(model), f"0.{seed}")
                assert await serves(client, model), kind
                await sender.close()

    asyncio.run(main())


def test_what_the_server_would_ignore_is_an_error_before_anything_is_sent(moe_folder: Path, llama_folder: Path) -> None:
    tied = Checkpoint.of(llama_folder)
    plain = received(changed(llama_folder, 1))
    assert [name for name, _ in tied.named([*plain, ("lm_head.weight", plain[0][1])])] == [name for name, _ in plain]
    with pytest.raises(WeightsError, match=r"has no model\.layers\.0\.mlp\.gate\.bias.*start it with the folder"):
        tied.named([*plain, ("model.layers.0.mlp.gate.bias", torch.zeros(3))])
    name, tensor = plain[1]
    with pytest.raises(WeightsError, match=r"shape \(3,\), the server's model has"):
        tied.named([(name, tensor.flatten()[:3])])
    experts = Checkpoint.of(moe_folder).named(received(changed(moe_folder, 1)))
    assert {name for name, _ in experts} == set(Checkpoint.of(moe_folder).shapes)
    with pytest.raises(WeightsError, match=r"has no model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"):
        Checkpoint.of(moe_folder).named([("model.layers.0.mlp.experts.down_proj", torch.zeros(5, 32, 32))])


class Told:
    """A client that answers what it is told, and remembers what it was asked."""

    url = "http://127.0.0.1:1"

    def __init__(self, answer: Callable[[str, Any], Any]) -> None:
        self.answer, self.asked = answer, list[tuple[str, Any]]()

    async def post(self, route: str, body: Any) -> Any:
        self.asked.append((route, body))
        found = self.answer(route, body)
        if isinstance(found, Exception):
            raise found
        return found


def test_a_tensor_that_did_not_arrive_is_seen() -> None:
    sent = torch.arange(8.0).view(2, 4) / 3
    exact = Readback(Told(lambda route, body: sent.tolist()))  # type: ignore[arg-type]
    asyncio.run(exact.check([("a.weight", sent)], "0.1"))
    rounded = Readback(Told(lambda route, body: sent.bfloat16().float().tolist()))  # type: ignore[arg-type]
    asyncio.run(rounded.check([("a.weight", sent)], "0.1"))
    stale = sent.clone()
    stale[1, 2] += 0.001
    wrong = Readback(Told(lambda route, body: stale.tolist()))  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match=r"weights a\.weight: .* has 2\.0009\d+ where 2 was sent \(element 6\)"):
        asyncio.run(wrong.check([("a.weight", sent)], "0.1"))


def test_a_model_whose_server_shows_no_weights_is_asked_once() -> None:
    told = Told(lambda route, body: EngineError("status 400"))
    readback = Readback(told)  # type: ignore[arg-type]
    for label in ("0.1", "0.2"):
        asyncio.run(readback.check([(f"{i}", torch.zeros(2)) for i in range(9)], label))
    assert readback.works is False and len(told.asked) == 1


def test_a_refusal_and_a_false_success_are_errors_and_no_request_flushes() -> None:
    checkpoint = Checkpoint({"a": (2,), "b": (3,)}, False)
    named = [("a", torch.zeros(2)), ("b", torch.ones(3))]
    told = Told(lambda route, body: {"success": True})
    asyncio.run(IpcSender(told, checkpoint).send(named, "1.2"))  # type: ignore[arg-type]
    assert [(body["flush_cache"], body.get("weight_version")) for _, body in told.asked] == [
        (False, None),
        (False, "1.2"),
    ]
    for answer in ({"success": False, "message": "no room"}, EngineError("status 400; the server says: no room")):
        refused = IpcSender(Told(lambda route, body, a=answer: a), checkpoint)  # type: ignore[arg-type,misc]
        with pytest.raises(WeightsError, match=r"the server refused them.*no room"):
            asyncio.run(refused.send(named, "1.2"))


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_group_with_a_server_that_hangs_ends_in_an_error(silent: str) -> None:
    async def main() -> None:
        sender = GroupSender(Client(silent, None), Checkpoint({"a": (2,)}, False))
        sender.timeout_s = 2.0
        with pytest.raises(EngineError, match=r"took more than 2 s|broke"):
            await sender.send([("a", torch.zeros(2))], "0.1")
        await sender.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_server_that_dies_within_a_broadcast_is_an_error_and_the_next_one_gets_the_weights(
    python: Path, release: Release, llama_folder: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        checkpoint = Checkpoint.of(llama_folder)
        async with started(python, llama_folder, tmp_path / "one") as (server, client):
            sender = GroupSender(client, checkpoint, sessions=release.sessions)
            sender.timeout_s = 30.0
            await sender.send(received(changed(llama_folder, 1)), "0.1")
            await client.post("/pause_generation", {"mode": "in_place"})
            work = asyncio.create_task(sender.send(received(changed(llama_folder, 2)), "0.2"))
            await asyncio.sleep(0)
            await server.stop()
            with pytest.raises(EngineError):
                await work
            await sender.close()
        async with started(python, llama_folder, tmp_path / "two") as (_, client):
            sender = GroupSender(client, checkpoint, sessions=release.sessions)
            model = changed(llama_folder, 2)
            await sender.send(received(model), "0.2")
            assert await serves(client, model)
            await sender.close()

    asyncio.run(main())


def test_the_checkpoint_of_a_thinker_has_its_names_with_a_prefix(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"thinker.model.a": torch.zeros(2), "talker.a": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    found = Checkpoint.of(tmp_path)
    assert found.tied
    assert [name for name, _ in found.named([("model.a", torch.ones(2))])] == ["thinker.model.a"]
