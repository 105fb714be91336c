"""Real files, sampled by the embedded engine and scored by the trainer: both read the same media in the same places."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from relax_core.chat import Chat, Seat
from relax_core.errors import DataError, MissingTrack
from relax_core.interfaces import Row
from relax_core.media import MediaStore
from relax_core.setup import EngineSetup
from relax_core.testing.media_files import stripes, tone, write_sound, write_video
from relax_core.testing.training import forward, row, tiny_trainer
from relax_core.torch.config import EngineConfig
from relax_core.torch.engine import TorchEngine
from relax_core.types import Audio, Image, Message, Sample, Sampling, ToolResult, Video, user
from relax_modalities.audio import Audio as Sounds
from relax_modalities.image import Image as Images
from relax_modalities.video import Video as Films
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.testing import tiny_omni

torch.set_num_threads(1)


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Two seconds with sound."""
    return write_video(tmp_path / "clip.mp4", stripes(48), sound=(tone(2.0, 16000), 16000))


def adapter_with(use: bool | str) -> OmniAdapter:
    found = tiny_omni(use_audio_in_video=use)
    modalities = {"image": Images(Images.Config()), "audio": Sounds(Sounds.Config()), "video": Films(Films.Config())}
    found.media = MediaStore(modalities, 10**9)
    return found


async def played(adapter: OmniAdapter, turns: list[list[Message]], member: int) -> Sample:
    """A conversation with the embedded engine; one sample, since nothing of it is rewritten."""
    engine = TorchEngine(EngineConfig(device="cpu"), EngineSetup(adapter, 3, False))
    await engine.start()
    chat = Chat(engine, adapter, Sampling(max_new_tokens=5), Seat(0, "task", 0, member, (0,)))
    try:
        for new in turns:
            await chat(*new)
    finally:
        chat.close()
        await engine.stop()
    [sample] = chat.samples
    return sample


def as_row(name: str, sample: Sample) -> Row:
    ids = np.array(sample.ids, np.int32)
    mask = np.array(sample.mask, np.int8)
    return row(name, [], ids.tolist(), mask.tolist(), media=sample.media, positions=sample.positions)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_the_trainer_scores_what_the_engine_sampled(clip: Path, tmp_path: Path, layout: str) -> None:
    """Rows of every kind in one micro-batch, also with media in the answer of a tool."""
    Pillow.fromarray(stripes(1)[0]).save(tmp_path / "bar.png")
    beep = write_sound(tmp_path / "beep.wav", tone(0.4, 44100, 2), 44100)
    zoomed = Message("tool", (ToolResult((Image(tmp_path / "bar.png"), Video(clip))),))
    plays: list[list[list[Message]]] = [
        [[user("which way ?", Video(clip))]],
        [[user("what colour ?", Image(tmp_path / "bar.png"))], [zoomed]],
        [[user("sum 1 + 2 = ?")]],
        [[user(Audio(beep), "which tone ?", Video(clip))], [user("which way ?")]],
    ]
    adapter = adapter_with(True)
    samples = [asyncio.run(asyncio.wait_for(played(adapter, turns, i), 60)) for i, turns in enumerate(plays)]
    rows = [as_row(f"g{i}/0", sample) for i, sample in enumerate(samples)]
    scored = forward(tiny_trainer(adapter, layout=layout), rows)
    for sample, columns in zip(samples, scored, strict=True):
        where = np.flatnonzero(sample.mask)
        assert len(where) == sample.sampled >= 1
        np.testing.assert_allclose(columns["logprobs"][where], np.array(sample.logprobs)[where], atol=2e-5)
    kinds = [[ref.kind for ref in sample.media] for sample in samples]
    assert kinds == [["video"], ["image", "image", "video"], [], ["audio", "video"]]


def test_the_sound_of_a_file_is_read_with_it(clip: Path, tmp_path: Path) -> None:
    """Four frames at two a second are two steps of 26 positions for two seconds; 26 tokens of sound between them."""
    adapter = adapter_with(True)
    row = adapter.encode([user(Video(clip))])
    [ref] = row.media
    plan = adapter.processor.plan(adapter.media.get(ref.key))
    assert plan.sound is not None and int(plan.sound.sum()) in (26, 27)  # AAC fills up its last packet
    seen = int((~plan.sound).sum()) // 2
    runs = np.split(plan.sound, np.flatnonzero(np.diff(plan.sound)) + 1)
    assert [(bool(run[0]), len(run)) for run in runs[:3]] == [(False, seen), (True, 13), (False, seen)]
    assert adapter_with("if_any").encode([user(Video(clip))]).ids == row.ids
    silent = write_video(tmp_path / "silent.mp4", stripes(48))
    with pytest.raises(MissingTrack, match=r"audio .*silent\.mp4: .*no audio stream"):
        adapter.encode([user(Video(silent))])
    without = adapter_with("if_any").encode([user(Video(silent))])
    assert without.ids == adapter_with(False).encode([user(Video(silent))]).ids


def test_a_file_whose_sound_is_torn_is_an_error_of_its_row(clip: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.mp4"
    torn.write_bytes(clip.read_bytes()[:-2000])
    for use in (True, "if_any"):
        with pytest.raises(DataError, match=r"torn\.mp4"):
            adapter_with(use).encode([user(Video(torn))])
