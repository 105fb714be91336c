"""Rows with media that made other frameworks hang, crash or train on wrong pixels: from the file to the gradient."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image as Pillow
from pyarrow import parquet
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from relax_algorithms.grpo import Grpo
from relax_core.config.schema import DataSection
from relax_core.errors import ConfigError, DataError
from relax_core.feed import Feed
from relax_core.interfaces import Row
from relax_core.media import MediaStore
from relax_core.plugins import activate
from relax_core.prompts import Prompts
from relax_core.run import build_modalities
from relax_core.tasks import TaskStream
from relax_core.testing.forwards import segment
from relax_core.testing.gradients import assert_close, caught, gradients
from relax_core.testing.media_files import tone, write_sound
from relax_core.testing.noise import film
from relax_core.testing.training import row, train
from relax_core.types import Decoded, Encoded, user
from relax_envs.single_turn import SingleTurn
from relax_plugin_omni.adapter import OmniAdapter
from relax_plugin_omni.processing import Processor
from relax_plugin_omni.testing import tiny_omni

pytestmark = pytest.mark.timeout(60)
torch.set_num_threads(1)
WORDS = ["what", "colour", "?", "red", "green", "blue", *(f"w{i}" for i in range(60))]
IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"


def adapter_of(**settings: Any) -> OmniAdapter:
    """A tiny omni adapter whose store decodes files."""
    adapter = tiny_omni(WORDS, **settings)
    adapter.media = MediaStore(build_modalities(activate(())), 10**9)
    return adapter


def png(path: Path, height: int = 64, width: int = 64, seed: int = 0) -> str:
    """Write noise; the name, as a row gives it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Pillow.fromarray(pixels).save(path)
    return path.name


def rows_file(folder: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return file


class Played:
    """What the feed gives for one pass over a file."""

    def __init__(self, file: Path, take: int, adapter: OmniAdapter | None = None, **settings: Any) -> None:
        self.adapter, self.notes = adapter or adapter_of(), list[str]()
        section = DataSection.model_validate_json(json.dumps({"max_bad_fraction": 0.9, **settings}))
        environment = SingleTurn(SingleTurn.Config(data=file))
        stream = TaskStream({"rows": (environment, 1.0)}, seed=0)
        self.feed = Feed(stream, Prompts(self.adapter, section), section, 2, self.notes.append)

        async def all() -> None:
            try:
                self.prompts = [await self.feed.take(i) for i in range(take)]
            finally:
                self.feed.close()

        asyncio.run(all())

    @property
    def ids(self) -> list[str]:
        """The rows' own ids, sorted."""
        return sorted(p.task.id.removeprefix("rows/").partition("#")[0] for p in self.prompts)

    def of(self, id: str) -> Encoded:
        (found,) = [p.encoded for p in self.prompts if p.task.id.startswith(f"rows/{id}#")]
        return found

    def tokens(self, id: str) -> str:
        """Its tokens, a run of placeholders written once."""
        names = self.adapter.tokenizer.convert_ids_to_tokens(self.of(id).ids)
        return " ".join(name for i, name in enumerate(names) if "pad" not in name or name != names[i - 1])


# --- rows that do not fit together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize(("written", "given"), [(0, 1), (1, 0), (2, 1), (1, 2), (3, 1)])
def test_placeholders_that_do_not_match_the_media_are_a_row_error_before_training(
    tmp_path: Path, kind: str, written: int, given: int
) -> None:
    name = png(tmp_path / "a.png")  # counted before anything is decoded
    bad = {"id": "bad", "prompt": "what " + f"<{kind}> " * written, f"{kind}s": [name] * given, "answer": "red"}
    good = [{"id": f"good{i}", "prompt": "what <image>", "images": [name], "answer": "red"} for i in range(3)]
    played = Played(rows_file(tmp_path, [good[0], bad, *good[1:]]), take=3)
    assert played.ids == ["good0", "good1", "good2"]
    (reason,) = [r for stream in played.feed.bad.state().values() for _, r in stream["rows"]]
    assert f"rows.jsonl:2: {written} <{kind}>" in reason and f"{given} in '{kind}s'" in reason
    assert len(played.notes) == 1 and reason in played.notes[0]


def test_more_bad_rows_than_allowed_end_the_run(tmp_path: Path) -> None:
    bad = {"prompt": "what <image>", "answer": "red"}
    file = rows_file(tmp_path, [bad] * 3 + [{"prompt": "what", "answer": "red"}])
    with pytest.raises(DataError, match=r"environments\.rows: .*rows\.jsonl:\d: .*max_bad_fraction"):
        Played(file, take=2, max_bad_fraction=0.5)


def test_a_placeholder_of_the_model_in_text_is_a_row_error_and_never_a_medium(tmp_path: Path) -> None:
    prompts = {"bad": f"what {IMAGE}", "good": "what"}
    rows = [{"id": id, "prompt": prompt, "answer": "red"} for id, prompt in prompts.items()]
    played = Played(rows_file(tmp_path, rows), take=2)
    assert played.ids == ["good", "good"] and "special token '<|vision_start|>'" in played.notes[0]


# --- rows that lack something, or have it in another form -------------------------------------------------------------

LACKING: dict[str, str] = {
    "missing": "",
    "null": ', "images": null, "metadata": null',
    "NaN": ', "images": NaN, "metadata": NaN',
    "empty": ', "images": [], "metadata": {}',
}


@pytest.mark.parametrize("written", LACKING.values(), ids=LACKING)
def test_what_a_row_lacks_may_be_written_in_any_way(tmp_path: Path, written: str) -> None:
    lines = ['{"id": "a", "prompt": "what colour ?", "answer": "red"' + written + "}"]
    played = Played(rows_file(tmp_path, lines), take=1)
    assert played.tokens("a") == "user what colour ? assistant" and played.of("a").media == ()
    assert played.prompts[0].task.metadata == {} and played.notes == []


@pytest.mark.parametrize("form", ["bytes", "path"])
def test_parquet_holds_the_bytes_of_pictures_or_their_paths(tmp_path: Path, form: str) -> None:
    """Rows with and without one in the same column; both forms give the same tokens and pixels."""
    name = png(tmp_path / "a.png", seed=3)
    content = (tmp_path / name).read_bytes()
    picture = {"bytes": content, "path": None} if form == "bytes" else {"bytes": None, "path": name}
    medium = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table(
        {
            "id": ["with", "empty", "null"],
            "prompt": ["what <image>", "what", "what"],
            "answer": ["red"] * 3,
            "images": pa.array([[picture], [], None], medium),
        }
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    played = Played(tmp_path / "rows.parquet", take=3)
    assert played.notes == []
    assert played.tokens("with") == f"user what {IMAGE} assistant"
    assert played.tokens("empty") == played.tokens("null") == "user what assistant"
    reference = Played(rows_file(tmp_path, [{"prompt": "<image>", "images": [name], "answer": "a"}]), take=1)
    (here,), (there,) = played.of("with").media, reference.prompts[0].encoded.media
    assert here.key == there.key


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_turned_photograph_is_seen_upright(tmp_path: Path) -> None:
    """A JPEG of 100 x 200 pixels with EXIF orientation 6 (turn clockwise): the grid, the tokens and the pixels."""
    tall = np.zeros((200, 100, 3), np.uint8)
    tall[:100] = 255  # its upper half is its right half once it is turned
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.fromarray(tall).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    Pillow.fromarray(np.rot90(tall, -1)).save(tmp_path / "upright.png")
    names = ("turned.jpg", "upright.png")
    rows = [{"id": name, "prompt": "<image>", "images": [name], "answer": "a"} for name in names]
    played = Played(rows_file(tmp_path, rows), take=2, adapter=adapter_of(image_pixels=[1024, 100_000]))
    turned, upright = (played.of(name) for name in names)
    assert turned.ids == upright.ids and turned.positions is not None
    assert (turned.positions == upright.positions).all()
    features = [played.adapter.media.get(found.media[0].key) for found in (turned, upright)]
    assert features[0]["grid"].tolist() == features[1]["grid"].tolist() == [1, 6, 12]
    assert np.abs(features[0]["pixels"] - features[1]["pixels"]).mean() < 0.02


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("size", [(448, 448), (1, 1), (16, 16), (27, 257), (2276, 10), (100, 200), (1000, 30)])
def test_tokens_of_a_picture_are_those_of_the_models_own_processor(patch: int, size: tuple[int, int]) -> None:
    budget = (56 * 56, 28 * 28 * 1280)
    settings = replace(tiny_omni().processor.settings, patch=patch, image_pixels=budget)
    pixels = np.zeros((*size, 3), np.uint8)
    edges = {"shortest_edge": budget[0], "longest_edge": budget[1]}
    theirs: Any = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, temporal_patch_size=2, size=edges)
    processor = Processor(settings)
    if max(size) > 200 * min(size):
        with pytest.raises(DataError, match="200 times"):
            processor.features(Decoded("image", pixels))
        with pytest.raises(ValueError, match="aspect ratio"):
            theirs(Pillow.fromarray(pixels))
        return
    grid = theirs(Pillow.fromarray(pixels))["image_grid_thw"][0].tolist()
    plan = processor.plan(processor.features(Decoded("image", pixels)))
    assert list(plan.grid or ()) == grid and plan.tokens == grid[1] * grid[2] // 4
    if size == (448, 448):
        assert plan.tokens == {14: 256, 16: 196}[patch]


def test_a_picture_that_cannot_be_used_is_a_row_error_that_names_it(tmp_path: Path) -> None:
    """Truncated, no picture, too long a strip, gone, or of no pixels; the run goes on with the others."""
    png(tmp_path / "good.png")
    png(tmp_path / "strip.png", 10, 2276)
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "short.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    bad = ["strip.png", "short.png", "text.png", "empty.png", "gone.png"]
    rows = [{"id": n, "prompt": "<image>", "images": [n], "answer": "a"} for n in ["good.png", *bad]]
    played = Played(rows_file(tmp_path, rows), take=2)
    assert played.ids == ["good.png", "good.png"], "the second time in the next pass"
    reasons = [r for stream in played.feed.bad.state().values() for _, r in stream["rows"]]
    assert len(reasons) == len(bad) and all(any(name in reason for reason in reasons) for name in bad)


# --- prompts over the limit -------------------------------------------------------------------------------------------


def long_rows(folder: Path) -> Path:
    """A short row, and one of 4 picture tokens and 60 words: 69 tokens with roles and borders."""
    name = png(folder / "a.png")
    text = " ".join(f"w{i}" for i in range(60))
    rows = [{"id": "short", "prompt": "what <image>"}, {"id": "long", "prompt": f"red <image> {text}"}]
    return rows_file(folder, [{**r, "images": [name], "answer": "a"} for r in rows])


@pytest.mark.parametrize(
    ("rule", "text"), [("cut_start", [f"w{i}" for i in range(50, 60)]), ("cut_end", [f"w{i}" for i in range(10)])]
)
def test_a_long_prompt_is_cut_in_its_text_never_through_a_medium(tmp_path: Path, rule: str, text: list[str]) -> None:
    limit = len(f"user red {IMAGE} assistant".split()) + 3 + 10
    played = Played(long_rows(tmp_path), take=2, max_prompt_tokens=limit, long_prompts=rule)
    assert played.tokens("long") == f"user red {IMAGE} {' '.join(text)} assistant"
    found = played.of("long")
    assert len(found.ids) == limit and [ref.length for ref in found.media] == [4]
    assert played.feed.counts == {"cut": 1} and played.notes == []
    played.adapter.forward_inputs([segment(found)], len(found.ids))  # which checks placeholders against media


def test_a_long_prompt_is_left_out_and_counted(tmp_path: Path) -> None:
    played = Played(long_rows(tmp_path), take=2, max_prompt_tokens=20, long_prompts="skip")
    assert played.ids == ["short", "short"]
    assert played.feed.counts["too_long"] >= 1 and not played.feed.bad.counts()


def test_a_long_prompt_ends_the_run_where_that_is_the_rule(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'rows/long#0': its prompt has 69 tokens, .* allows 20"):
        Played(long_rows(tmp_path), take=2, max_prompt_tokens=20)


def test_a_prompt_whose_media_alone_are_too_long_is_a_bad_row(tmp_path: Path) -> None:
    name = png(tmp_path / "a.png")
    rows: list[dict[str, Any]] = [
        {"id": "media", "prompt": "what <image><image><image>", "images": [name] * 3, "answer": "a"},
        {"id": "good", "prompt": "what", "answer": "a"},
    ]
    played = Played(rows_file(tmp_path, rows), take=2, max_prompt_tokens=12, long_prompts="cut_end")
    assert played.ids == ["good", "good"] and "does not suffice" in played.notes[0]


# --- batches of all kinds ---------------------------------------------------------------------------------------------


def test_text_rows_and_media_rows_in_one_batch_give_the_gradient_of_any_cut(tmp_path: Path) -> None:
    """A micro-batch may hold text only, media only, or both, in any order."""
    png(tmp_path / "a.png", seed=1)
    write_sound(tmp_path / "a.wav", tone(0.5, 16_000), 16_000)
    contents: list[dict[str, Any]] = [
        {"id": "text", "prompt": "what colour ?"},
        {"id": "image", "prompt": "what <image> ?", "images": ["a.png"]},
        {"id": "other", "prompt": "blue ?"},
        {"id": "audio", "prompt": "<audio> ?", "audios": ["a.wav"]},
    ]
    played = Played(rows_file(tmp_path, [{**c, "answer": "red"} for c in contents]), take=4)
    made = [_trained(played.of(str(c["id"])), i) for i, c in enumerate(contents)]
    found = []
    for cut in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [0], [1], [2]], [[1, 3], [2, 0]]):
        trainer = caught(played.adapter)
        train(trainer, 0, [[made[i] for i in part] for part in cut], Grpo(Grpo.Config()))
        found.append(gradients(trainer))
    assert any("visual" in name for name in found[0]) and any("audio" in name for name in found[0])
    for other in found[1:]:
        assert_close(other, found[0], 2e-5)


def test_two_clips_of_one_size_and_different_lengths_keep_their_own_features() -> None:
    """76 and 12 frames in one batch: log-probs are those of each alone."""
    adapter = tiny_omni(WORDS)
    encoded = [adapter.encode([user("what", film(n, seed=n), "?")]) for n in (76, 12)]
    model = adapter.load("cpu", torch.float32)

    def logits(rows: Sequence[Encoded]) -> list[torch.Tensor]:
        width = max(len(found.ids) for found in rows)
        inputs = adapter.forward_inputs([segment(found) for found in rows], width)
        with torch.no_grad():
            hidden = adapter.head(model, adapter.backbone(model, **inputs))
        return [hidden[i, : len(found.ids)] for i, found in enumerate(rows)]

    together = logits(encoded)
    for whole, found in zip(together, encoded, strict=True):
        torch.testing.assert_close(whole, logits([found])[0], atol=1e-4, rtol=0)
    assert [ref.length for found in encoded for ref in found.media] == [38 * 4, 6 * 4]


def _trained(found: Encoded, number: int) -> Row:
    """The prompt with a reply of two words, as a row of a group of its own."""
    assert found.positions is not None
    first = int(found.positions.max()) + 1
    after = np.broadcast_to(np.arange(first, first + 2, dtype=np.int32), (3, 2))
    positions = np.concatenate([found.positions, after], axis=1)
    return row(f"g{number}/0", found.ids, [8, 1], advantage=1.0 - 0.5 * number, media=found.media, positions=positions)
