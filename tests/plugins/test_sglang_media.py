"""What of media in the sglang plugin needs no server: what is sent, folders that servers know, refusals, names."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_core.errors import EngineError
from relax_core.interfaces import Segment
from relax_core.setup import EngineSetup
from relax_core.testing.engines import request
from relax_core.testing.noise import picture, sound
from relax_core.testing.tiny import tiny_adapter
from relax_core.types import user
from relax_plugin_omni.processing import audio_chunks, audio_tokens, filled
from relax_plugin_omni.testing import mixed_rows, tiny_omni
from relax_plugin_sglang import media
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.engine import SglangEngine
from relax_plugin_sglang.folder import model_config, model_folder, routing
from relax_plugin_sglang.media import check_model
from relax_plugin_sglang.names import Checkpoint
from relax_plugin_sglang.wire import Wire

torch.set_num_threads(1)


def array(found: dict[str, Any]) -> NDArray[Any]:
    data = np.frombuffer(base64.b64decode(found["data"]), found["dtype"])
    return data.reshape(found["shape"])


def test_a_request_carries_the_trainers_features_bit_for_bit() -> None:
    adapter = tiny_omni()
    wire = Wire.of(adapter, None, None)
    for row in mixed_rows(adapter):
        body = json.loads(json.dumps(wire.body(request("r", row), "id", "salt")))
        assert body["input_ids"] == row.ids
        if not row.media:
            assert "image_data" not in body
            continue
        carried = json.loads(*body["image_data"])
        assert row.positions is not None and np.array_equal(array(carried["positions"]), row.positions)
        inputs = adapter.forward_inputs([Segment(row.ids, row.media, row.positions)], len(row.ids))
        items = carried["items"]
        assert [item["kind"] for item in items] == [ref.kind for ref in row.media]
        assert [item["places"] for item in items] == [[[m.start, m.start + m.length - 1]] for m in row.media]
        pixels = [array(v) for item in items for name, v in item["features"].items() if name.startswith("pixel")]
        if pixels:
            assert np.array_equal(np.concatenate(pixels), inputs["media_pixels"].numpy())
        heard = [array(item["features"]["input_features"]) for item in items if item["kind"] == "audio"]
        if heard:
            chunks, _ = audio_chunks(heard, adapter.processor.settings.window)
            assert np.array_equal(chunks, inputs["media_chunks"].numpy())


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 50, 96, 97, 99, 100, 101, 150, 199, 200])
def test_a_filled_spectrogram_has_as_many_tokens_and_whole_chunks(frames: int) -> None:
    mel = np.ones((2, frames), np.float32)
    full = filled(mel, 50)
    assert audio_tokens(full.shape[1], 50) == audio_tokens(frames, 50)
    assert np.array_equal(full[:, :frames], mel) and not full[:, frames:].any()
    for found, wanted in zip(audio_chunks([full], 50)[:1], audio_chunks([mel], 50)[:1], strict=True):
        assert np.array_equal(found, wanted)


def test_the_folder_of_a_thinker_becomes_one_that_a_server_knows(tmp_path: Path) -> None:
    adapter = tiny_omni()
    whole = model_folder(SglangConfig(python=Path("python"), dtype="float32"), adapter, tmp_path)
    config = model_config(whole)
    assert config["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]
    assert config["model_type"] == "qwen3_omni_moe"
    assert config["thinker_config"]["text_config"]["rope_parameters"]["mrope_interleaved"] is True
    assert routing(whole) == (2, 2)
    check_model(adapter, config["model_type"])
    named = list(adapter.load("cpu", torch.float32).named_parameters())
    found = Checkpoint.of(whole).named(named)
    assert {name for name, _ in found} == set(Checkpoint.of(whole).shapes)


def test_a_whole_checkpoint_with_older_names_takes_a_thinkers_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    names = {
        "thinker.model.norm.weight": "model.language_model.norm.weight",
        "thinker.visual.patch_embed.proj.bias": "model.visual.patch_embed.proj.bias",
        "thinker.audio_tower.ln_post.bias": "model.audio_tower.ln_post.bias",
        "thinker.lm_head.weight": "lm_head.weight",
    }
    others = {"talker.model.norm.weight": torch.zeros(3), "code2wav.a": torch.zeros(3)}
    save_file({name: torch.zeros(2) for name in names} | others, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = Checkpoint.of(tmp_path).named([(name, torch.ones(2)) for name in names.values()])
    assert [name for name, _ in found] == list(names)


def test_models_whose_media_no_server_reads_are_refused_before_it_starts() -> None:
    adapter = tiny_adapter(images=True)
    engine = SglangEngine(SglangConfig(python=Path("python")), EngineSetup(adapter, 0, False))
    with pytest.raises(EngineError, match=r"TinyAdapter, which reads image, does not hand them over \(tower_inputs\)"):
        asyncio.run(engine.start())
    with pytest.raises(EngineError, match=r"gives no audio, image, video to a model of type llava .*qwen3_omni_moe"):
        check_model(tiny_omni(), "llava")
    check_model(tiny_adapter(), "llava")


def test_a_row_of_text_says_nothing_of_media() -> None:
    adapter = tiny_omni()
    assert not adapter.tower_inputs(Segment(adapter.encode([user("?")]).ids))
    row = adapter.encode([user(picture(), "?", sound())])
    keys = [each.key for each in adapter.tower_inputs(Segment(row.ids, row.media))]
    assert keys == [ref.key for ref in row.media]


def test_both_sides_name_one_format() -> None:
    """The server's side runs in another interpreter, and imports nothing of ours."""
    server = Path(media.__file__).parent / "processes" / "relax_media" / "processor" / "features.py"
    assert f'FORMAT = "{media.FORMAT}"' in server.read_text(encoding="utf-8")
