"""``relax decode``: shapes, times, tokens and hashes of files of all kinds, or why they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image as Pillow

from relax_core.cli import main
from relax_core.testing.media_files import stripes, tone, write_sound, write_video
from relax_core.testing.runs import TEXT_RUN


def decode(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and what ``relax decode --json`` prints."""
    with pytest.raises(SystemExit) as stop:
        main(["decode", "--json", *map(str, arguments)])
    assert isinstance(stop.value.code, int)
    return stop.value.code, json.loads(capsys.readouterr().out)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (448, 448, 3), np.uint8)
    Pillow.fromarray(pixels).save(tmp_path / "square.png")
    return tmp_path / "square.png"


def test_an_image(capsys: pytest.CaptureFixture[str], picture: Path) -> None:
    code, [found] = decode(capsys, picture)
    assert code == 0 and len(found.pop("content_hash")) == 32
    assert found == {
        "file": str(picture),
        "kind": "image",
        "shape": [448, 448, 3],
        "dtype": "uint8",
        "duration": None,
        "rate": None,
        "timestamps": None,
        "tokens": 14 * 14,  # of a model with patches of 16 pixels, four of which are merged
        "error": None,
    }


def test_an_image_lying_on_its_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.new("RGB", (200, 100), "red").save(path, exif=exif)
    _, [found] = decode(capsys, path)
    assert found["shape"] == [200, 100, 3] and found["tokens"] == 6 * 3


def test_a_sound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_sound(tmp_path / "two.wav", tone(2.0, 44100, 2), 44100)
    code, [found] = decode(capsys, path)
    assert code == 0 and (found["kind"], found["shape"], found["dtype"]) == ("audio", [32000], "float32")
    assert (found["duration"], found["rate"], found["tokens"]) == (2.0, 16000.0, 26)


def test_a_video_with_sound_is_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", stripes(48), sound=(tone(2.0, 16000), 16000))
    code, found = decode(capsys, path)
    assert code == 0 and [one["kind"] for one in found] == ["video", "audio"]
    assert found[0]["shape"] == [4, 64, 128, 3] and found[0]["timestamps"] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert (found[0]["duration"], found[0]["rate"]) == (2.0, 2.0) and found[0]["tokens"] > 0
    assert found[1]["duration"] == pytest.approx(2.0, abs=0.1)
    _, [only] = decode(capsys, path, "--kind", "audio")
    assert only == found[1]


def test_a_silent_video_is_one_medium(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_video(tmp_path / "silent.mp4", stripes(24))
    code, both = decode(capsys, path)
    assert code == 0 and [one["kind"] for one in both] == ["video"]
    code, [found] = decode(capsys, path, "--kind", "audio")
    assert code == 2 and "silent.mp4" in found["error"] and "no audio stream" in found["error"]


def test_a_sound_is_no_video(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_sound(tmp_path / "two.mp3", tone(2.0, 44100, 2), 44100)
    code, [found] = decode(capsys, path)
    assert code == 0 and (found["kind"], found["duration"], found["tokens"]) == ("audio", 2.0, 26)
    code, [found] = decode(capsys, path, "--kind", "video")
    assert code == 2 and found["kind"] == "video" and found["shape"] is None and "two.mp3" in found["error"]


def test_a_still_gif_is_an_image(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "still.gif"
    Pillow.new("P", (64, 32)).save(path)
    code, [found] = decode(capsys, path)
    assert code == 0 and (found["kind"], found["shape"]) == ("image", [32, 64, 3])


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_half_a_file_is_an_error_of_its_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    whole = (
        write_video(tmp_path / "clip.mp4", stripes(24))
        if kind == "video"
        else write_sound(tmp_path / "clip.wav", tone(1.0, 16000), 16000)
    )
    path = whole.with_stem("half")
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    code, [found] = decode(capsys, path)
    assert code == 2 and found["kind"] == kind and found["shape"] is None and "truncated" in found["error"]


def test_what_is_no_medium_is_said_to_be_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.jpg"
    path.write_text("<!doctype html><html>404</html>")
    code, [found] = decode(capsys, path)
    assert code == 2 and found["kind"] is None
    assert "neither image nor video nor audio" in found["error"] and "an HTML page, download it again" in found["error"]


def test_sound_in_a_container_of_videos(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, [found] = decode(capsys, write_sound(tmp_path / "sound.m4a", tone(1.0, 16000), 16000))
    assert code == 0 and found["kind"] == "audio"


def test_an_animation_is_an_image_unless_said_otherwise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "moving.gif"
    frames = [Pillow.fromarray(frame) for frame in stripes(6)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)
    _, [still] = decode(capsys, path)
    assert still["kind"] == "image" and still["shape"] == [64, 128, 3]
    _, [moving] = decode(capsys, path, "--kind", "video")
    assert moving["kind"] == "video" and moving["shape"][0] == 6


def test_a_name_means_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: Path) -> None:
    path = tmp_path / "picture.mp4"
    path.write_bytes(picture.read_bytes())
    _, [found] = decode(capsys, path)
    assert found["kind"] == "image" and found["error"] is None


def test_what_cannot_be_read_is_named_and_the_others_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: Path
) -> None:
    half = tmp_path / "half.png"
    half.write_bytes(picture.read_bytes()[:5000])
    words = tmp_path / "words.txt"
    words.write_text("no medium at all")
    empty = tmp_path / "empty.wav"
    empty.touch()
    thin = tmp_path / "thin.png"
    Pillow.new("RGB", (2276, 10)).save(thin)
    nowhere = tmp_path / "nowhere.mp4"
    code, found = decode(capsys, half, words, picture, empty, thin, nowhere)
    assert code == 2 and len(found) == 6
    by_file = {one["file"]: one for one in found}
    assert by_file[str(picture)]["error"] is None
    for path, reason in ((half, "truncated"), (words, "read"), (empty, "empty"), (nowhere, "no such file")):
        one = by_file[str(path)]
        assert (
            one["shape"] is None and str(path) in one["error"] and reason in one["error"] and "\n" not in one["error"]
        )
    one = by_file[str(thin)]  # decoded, but not for this model
    assert one["shape"] == [10, 2276, 3] and one["tokens"] is None and "more than 200 times" in one["error"]


def test_equal_content_has_an_equal_hash(capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: Path) -> None:
    other = tmp_path / "other.bmp"
    Pillow.open(picture).save(other)
    _, found = decode(capsys, picture, other)
    assert found[0]["content_hash"] == found[1]["content_hash"]


def test_decoders_and_model_of_a_run_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: Path) -> None:
    run = TEXT_RUN | {
        "plugins": ["omni"],
        "model": {"id": "qwen3-omni", "tiny": {"words": ["?"]}, "image_tokens": 9},
        "modalities": [{"id": "image", "max_pixels": 300_000}],
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    _, [found] = decode(capsys, picture, "--run", path)
    assert found["tokens"] == 4  # a tiny model reads up to 64 x 64 pixels
    large = tmp_path / "large.png"
    Pillow.new("RGB", (600, 600)).save(large)
    code, [found] = decode(capsys, large, "--run", path)
    assert code == 2 and "max_pixels allows 300000" in found["error"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path, picture: Path) -> None:
    clip = write_video(tmp_path / "clip.mp4", stripes(240))
    with pytest.raises(SystemExit):
        main(["decode", str(picture), str(clip), str(tmp_path / "none.wav")])
    said = capsys.readouterr().out
    assert "448 x 448 x 3" in said and "196" in said and "0.00 0.50 1.00 ... 9.00 9.50" in said
    assert f"error: {tmp_path / 'none.wav'}: no such file" in said


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--kind", "imag"], "did you mean 'image'"), (["--model", "qwen-omni"], "qwen3-omni")]
)
def test_wrong_options(arguments: list[str], words: str, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["decode", str(picture), *arguments])
    assert stop.value.code == 2 and words in capsys.readouterr().err
