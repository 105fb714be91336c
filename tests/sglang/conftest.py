"""A real SGLang server of each tiny model for all tests of this folder: to start one takes longer than most of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_core.interfaces import ModelAdapter
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.models.words import word_tokenizer
from relax_core.testing.tiny import tiny_adapter
from relax_plugin_sglang.client import Client
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.folder import whole_folder
from relax_plugin_sglang.release import Release, installed
from relax_plugin_sglang.server import Server

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def python() -> Path:
    """Of the environment that ``make test-sglang`` builds."""
    given = os.environ.get("RELAX_SGLANG_PYTHON")
    found = Path(given) if given else ROOT / ".venv-sglang" / "bin" / "python"
    if not given and not found.exists():
        pytest.skip("no environment with SGLang: make test-sglang builds one")
    return found


@pytest.fixture(scope="session")
def release(python: Path) -> Release:
    """Of the SGLang in it."""
    found = Release.of(installed(python, "sglang"))
    assert found.number, f"{python} has no SGLang"
    return found


@dataclass(frozen=True)
class Served:
    """A server in its own thread, and the model that it serves in float32. ``key_env`` holds its key, ``log`` what it
    printed."""

    adapter: ModelAdapter
    url: str
    key_env: str
    log: Path

    def config(self, **settings: Any) -> SglangConfig:
        """Of an engine on this server."""
        return SglangConfig(url=self.url, key_env=self.key_env, dtype="float32", **settings)


class _Thread:
    """An event loop beside the tests, in which a server is watched."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(240)


def _serve(
    adapter: ModelAdapter, config: SglangConfig, folder: Path, log: Path, media: bool = False
) -> Iterator[Served]:
    thread = _Thread()

    async def start() -> Server:
        server = Server(config, folder, "cpu", log, media)
        client = Client(server.url, server.key)
        await server.start(client)
        await client.close()
        return server

    server = thread.run(start())
    with pytest.MonkeyPatch.context() as patch:
        name = f"RELAX_TEST_SGLANG_{server.port}"
        patch.setenv(name, server.key)
        yield Served(adapter, server.url, name, log)
    thread.run(server.stop())
    thread.loop.call_soon_threadsafe(thread.loop.stop)


@pytest.fixture(scope="session")
def dense(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny random Qwen3."""
    import torch

    adapter, folder = tiny_adapter(max_positions=2048), tmp_path_factory.mktemp("qwen3")
    adapter.save(adapter.load("cpu", torch.float32), folder)
    config = SglangConfig(python=python, device="cpu", dtype="float32")
    yield from _serve(adapter, config, folder, folder / "server.log")


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE: two layers, two of four experts for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from relax_core.models import hf

    folder = tmp_path_factory.mktemp("qwen3-moe")
    tokenizer = word_tokenizer([f"w{i:02d}" for i in range(29)])
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with hf.seeded(0):
        hf.save_pretrained(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def moe(python: Path, moe_folder: Path) -> Iterator[Served]:
    """With routed experts."""
    adapter = TextAdapter(TextConfig(path=moe_folder), MediaStore({}, max_bytes=1 << 20), 0)
    config = SglangConfig(python=python, device="cpu", dtype="float32", routed_experts=True)
    yield from _serve(adapter, config, moe_folder, moe_folder / "server.log")


@pytest.fixture(scope="session")
def omni(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny random Qwen3-Omni thinker: pictures, sounds and videos."""
    import torch

    from relax_plugin_omni.testing import WORDS, tiny_omni

    adapter, folder = tiny_omni((*WORDS, "w00", "w01"), use_audio_in_video="if_any"), tmp_path_factory.mktemp("omni")
    adapter.save(adapter.load("cpu", torch.float32), folder / "thinker")
    config = SglangConfig(python=python, device="cpu", dtype="float32")
    yield from _serve(adapter, config, whole_folder(folder / "thinker", folder / "whole"), folder / "server.log", True)
