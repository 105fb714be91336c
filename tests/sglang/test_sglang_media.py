"""Pictures, sounds and videos in a real server: it reads the very features that the trainer reads, in their places."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from relax_core.chat import Chat, Seat
from relax_core.errors import DataError, EngineError
from relax_core.media import MediaStore
from relax_core.setup import EngineSetup
from relax_core.testing import check_engine
from relax_core.testing.engines import changed_weights, request
from relax_core.testing.media_files import stripes, tone, write_video
from relax_core.testing.noise import film, picture, sound
from relax_core.testing.runs import summary, train
from relax_core.torch.plain import full_logprobs
from relax_core.transports import SharedTransport
from relax_core.types import Encoded, Sampling, Version, Video, user
from relax_modalities.audio import Audio as Sounds
from relax_modalities.video import Video as Films
from relax_plugin_omni.testing import mixed_rows
from relax_plugin_sglang.engine import SglangEngine

torch.set_num_threads(1)


def serving(served: Any, test: Callable[[SglangEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = SglangEngine(served.config(), EngineSetup(served.adapter, 3, False))
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 200))


async def differences(engine: SglangEngine, model: Any, prompts: list[Encoded], name: str) -> list[float]:
    """For each prompt the largest difference between the log-probs of the engine's reply and the model's in memory."""
    adapter = engine.setup.adapter
    replies = await asyncio.gather(
        *(engine.generate(request(f"{name}-{i}", prompt, 12)) for i, prompt in enumerate(prompts))
    )
    found = []
    for prompt, reply in zip(prompts, replies, strict=True):
        wanted = full_logprobs(adapter, model, prompt, reply.ids)
        found.append(max(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True)))
    return found


def test_it_keeps_the_promises_of_an_engine_with_a_qwen3_omni(omni: Any) -> None:
    check_engine(lambda setup: SglangEngine(omni.config(), setup), adapter=omni.adapter, limit_s=120, long=1024)


def test_replies_to_every_medium_have_the_log_probs_of_the_model_in_memory(omni: Any) -> None:
    """All at once, so that towers get batches of different sizes; then with other weights, towers' included: what the
    server keeps of a medium must not outlive the weights that made it."""

    async def test(engine: SglangEngine) -> None:
        rows = mixed_rows(omni.adapter)
        model = omni.adapter.load("cpu", torch.float32)
        short = [omni.adapter.encode([user(sound(8000, seed=9), "?")])]  # by itself no longer clip fills it up
        assert max(await differences(engine, model, short, "short")) < 1e-3
        found = await differences(engine, model, rows, "first")
        assert max(found) < 1e-3, found
        named = changed_weights(model, 1, 0.1)
        transport = SharedTransport(SharedTransport.Config())
        await engine.load_weights(transport.publish(Version(0, 7), named))
        transport.close()
        assert min(await differences(engine, model, rows, "old")) > 1e-3, "new weights change nothing"
        with torch.no_grad():
            for (_, parameter), (_, new) in zip(model.named_parameters(), named, strict=True):
                parameter.copy_(new)
        found = await differences(engine, model, rows, "new")
        assert max(found) < 1e-3, found

    serving(omni, test)


def test_a_video_is_read_with_its_sound(omni: Any, tmp_path: Path) -> None:
    adapter = omni.adapter
    before = adapter.media
    adapter.media = MediaStore({"audio": Sounds(Sounds.Config()), "video": Films(Films.Config())}, 10**9)
    clip = write_video(tmp_path / "clip.mp4", stripes(48), sound=(tone(2.0, 16000), 16000))

    async def test(engine: SglangEngine) -> None:
        rows = [adapter.encode([user("which way ?", Video(clip))]), adapter.encode([user(Video(clip), sound(), "?")])]
        assert len(adapter.tower_inputs(rows[0])) == 2
        found = await differences(engine, adapter.load("cpu", torch.float32), rows, "both")
        assert max(found) < 1e-3, found

    try:
        serving(omni, test)
    finally:
        adapter.media = before


@pytest.mark.parametrize("make", [picture, sound, film])
def test_what_a_medium_shows_changes_the_log_probs(omni: Any, make: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        rows = [omni.adapter.encode([user("what ?", make(seed=seed))]) for seed in (1, 2)]
        assert rows[0].ids == rows[1].ids
        asked = [request("same", row, 1, temperature=0.0) for row in rows]
        one, other = [(await engine.generate(each)).logprobs[0] for each in asked]
        assert abs(one - other) > 1e-4

    serving(omni, test)


def test_later_turns_bring_media_of_their_own(omni: Any) -> None:
    async def test(engine: SglangEngine) -> None:
        chat = Chat(engine, omni.adapter, Sampling(max_new_tokens=5), Seat(0, "task", 0, 0, (0,)))
        turns: list[list[Any]] = [
            ["what colour ?", picture(seed=3)],
            [sound(seed=4), "?"],
            ["which way ?", film(seed=5)],
        ]
        for new in turns:
            await chat(user(*new))
        chat.close()
        (sample,) = chat.samples
        assert [ref.kind for ref in sample.media] == ["image", "audio", "video"]
        model = omni.adapter.load("cpu", torch.float32)
        for end, own in enumerate(sample.mask):
            if not own:
                continue
            assert sample.positions is not None
            media = tuple(ref for ref in sample.media if ref.start < end)
            prompt = Encoded(sample.ids[:end], media, sample.positions[:, :end])
            (wanted,) = full_logprobs(omni.adapter, model, prompt, [sample.ids[end]])
            assert abs(wanted - sample.logprobs[end]) < 1e-3, end
        assert sum(sample.mask) >= 3

    serving(omni, test)


def test_placeholders_that_do_not_fit_are_an_error_with_the_numbers(omni: Any) -> None:
    """The model's adapter refuses them first; here it is passed over, and the server says so itself, and goes on."""

    async def test(engine: SglangEngine) -> None:
        life = engine.alive()
        row = omni.adapter.encode([user("what colour ?", picture(64, 64))])
        (ref,) = row.media
        body = life.wire.body(request("fits", row, 2), life.rid(), "salt")
        short = replace(row, ids=[*row.ids[: ref.start], *row.ids[ref.start + 1 :]])
        with pytest.raises(DataError, match="a row holds 3 image placeholders, and its image media take 4"):
            await engine.generate(request("short", short, 2))
        cases = {
            "the prompt has 3 image placeholders .*, and its media take 4": {"input_ids": short.ids},
            r"positions \(3, \d+\) for \d+ ids": {"input_ids": [*row.ids, 5]},
        }
        for words, change in cases.items():
            with pytest.raises(EngineError, match=words):
                await life.client.generate({**body, "rid": life.rid(), **change})
        carried = json.loads(body["image_data"][0])
        (item,) = carried["items"]
        first, last = item["places"][0]
        item["places"] = [(first, last - 1)]
        body["image_data"] = [json.dumps(carried)]
        with pytest.raises(EngineError, match="image has 3 placeholders, the server's model reads 4 tokens"):
            await life.client.generate({**body, "rid": life.rid()})
        assert (await engine.generate(request("fits", row, 2))).ids

    serving(omni, test)


def test_a_server_elsewhere_without_our_packages_is_refused(dense: Any, omni: Any) -> None:
    """``dense`` serves another model too, but what it can read is asked first."""

    async def main() -> None:
        engine = SglangEngine(dense.config(), EngineSetup(omni.adapter, 3, False))
        with pytest.raises(EngineError, match="does not read the features of media that we send"):
            await engine.start()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.timeout(300)
def test_a_run_with_every_medium(python: Path, tmp_path: Path) -> None:
    run = yaml.safe_load((Path(__file__).parents[2] / "configs" / "omni-tiny.yaml").read_text())
    engine = {"id": "sglang", "python": str(python), "device": "cpu"}
    more = {"steps": 3, "groups_per_step": 8, "group_size": 4, "evaluation": [], "plugins": ["omni", "sglang"]}
    more |= {"engine": engine, "runs": str(tmp_path / "runs"), "trainer": {**run["trainer"], "dtype": "bfloat16"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run | more))
    directory = train(file)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = [line["train/mismatch/abs"] for line in lines]
    assert len(found) == 3 and 0 < max(found) < 0.01, found
    groups = summary(directory)["groups"]
    assert groups["trained"] == 24 and not groups["failed"]
