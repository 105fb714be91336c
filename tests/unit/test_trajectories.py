"""Trajectory files: readable lines, media once under their hash and verified when read back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.errors import CheckpointError, DataError
from relax_core.interfaces import Modality
from relax_core.testing.plays import picture, played_group
from relax_core.trajectories import TrajectoryFiles
from relax_core.types import (
    Audio,
    Decoded,
    Group,
    Image,
    MediaKind,
    MediaPart,
    Text,
    ToolResult,
    Video,
    message,
)
from relax_modalities.audio import Audio as AudioModality
from relax_modalities.image import Image as ImageModality
from relax_modalities.video import Video as VideoModality

KINDS: dict[MediaKind, type[Modality]] = {"image": ImageModality, "audio": AudioModality, "video": VideoModality}


@pytest.fixture
def modalities() -> dict[MediaKind, Modality]:
    return {kind: cls(cls.Config()) for kind, cls in KINDS.items()}


def sound() -> Decoded:
    return Decoded("audio", np.sin(np.arange(800) / 7).astype(np.float32), 16000)


def clip() -> Decoded:
    return Decoded("video", np.arange(3 * 8 * 8 * 3).reshape(3, 8, 8, 3).astype(np.uint8), 2.0)


def lines(folder: Path, step: int) -> list[dict[str, Any]]:
    content = (folder / f"step-{step:08d}.jsonl").read_bytes()
    assert content.endswith(b"\n")
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def with_messages(group: Group, *parts: MediaPart | Text | ToolResult) -> Group:
    """The same group with another prompt."""
    group.task = dataclasses.replace(group.task, messages=(message("user", *parts),))
    for t in group.trajectories:
        t.task = group.task
        t.turns = [dataclasses.replace(t.turns[0], prompt=group.task.messages)]
    return group


# --- lines ------------------------------------------------------------------------------------------------------------


def test_one_line_a_trajectory(tmp_path: Path) -> None:
    groups = [played_group(0), played_group(1)]
    TrajectoryFiles(tmp_path, {}).write(12, groups)
    found = lines(tmp_path, 12)
    played = [(g, t) for g in groups for t in g.trajectories]
    assert len(found) == 8
    for line, (group, trajectory) in zip(found, played, strict=True):
        sample = trajectory.samples[0]
        assert (line["step"], line["group"], line["member"]) == (12, group.id, trajectory.member)
        assert line["task"]["answer"] == group.task.answer
        assert line["task"]["messages"][0]["parts"] == [{"type": "text", "text": f"what is {group.serial}?"}]
        assert line["turns"][0]["reply"]["parts"][0]["text"] == f"réponse {trajectory.member}"
        assert line["rewards"] == {"exact": trajectory.reward, "format": None}
        [found_sample] = line["samples"]
        assert found_sample["ids"] == sample.ids
        assert found_sample["mask"] == sample.mask
        assert found_sample["versions"] == sample.versions
        assert found_sample["logprobs"] == pytest.approx(sample.logprobs, abs=6e-6)


def test_text_of_every_script_stays_readable(tmp_path: Path) -> None:
    group = with_messages(played_group(0, members=2), Text("多少? مرحبا 🎉\n\u2028"))
    group.trajectories[0].turns[0] = dataclasses.replace(
        group.trajectories[0].turns[0], reply=message("assistant", "half \ud83d")
    )
    TrajectoryFiles(tmp_path, {}).write(0, [group])
    escaped, plain = lines(tmp_path, 0)
    assert plain["task"]["messages"][0]["parts"][0]["text"] == "多少? مرحبا 🎉\n\u2028"
    assert "多少? مرحبا 🎉" in (tmp_path / "step-00000000.jsonl").read_text().split("\n")[1]
    assert escaped["turns"][0]["reply"]["parts"][0]["text"] == "half \ud83d"


def test_every(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    files = TrajectoryFiles(tmp_path, modalities, every=2)
    for step in range(4):
        files.write(step, [played_group(step, picture_of=step)])
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["step-00000000.jsonl", "step-00000002.jsonl"]
    assert len(list((tmp_path / "media").iterdir())) == 4  # any step may be replayed


def test_cut_back(tmp_path: Path) -> None:
    files = TrajectoryFiles(tmp_path, {})
    for step in range(4):
        files.write(step, [])
    (tmp_path / ".step-00000004.jsonl.partial").write_text("{")
    files.cut_back(2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["step-00000000.jsonl", "step-00000001.jsonl"]


# --- media ------------------------------------------------------------------------------------------------------------


def test_media_come_back_bit_for_bit(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    media = [picture(1), sound(), clip()]
    group = with_messages(played_group(0), Image(media[0]), Audio(media[1]))
    result = ToolResult((Text("look"), Video(media[2])))
    group.trajectories[1].turns.append(
        dataclasses.replace(group.trajectories[1].turns[0], prompt=(message("tool", result),))
    )
    files = TrajectoryFiles(tmp_path, modalities)
    files.write(0, [group])
    for medium in media:
        found = TrajectoryFiles(tmp_path, modalities).media(medium.kind, medium.hash)
        assert found.hash == medium.hash
        assert found.rate == medium.rate
        assert np.array_equal(found.data, medium.data) and found.data.dtype == medium.data.dtype
    named = lines(tmp_path, 0)[1]["turns"][1]["prompt"][0]["parts"][0]["parts"][1]
    assert named == {"type": "video", "hash": media[2].hash}


def test_each_medium_is_written_once(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    files = TrajectoryFiles(tmp_path, modalities)
    files.write(0, [played_group(0, picture_of=1), played_group(1, picture_of=1), played_group(2, picture_of=2)])
    paths = sorted((tmp_path / "media").iterdir())
    assert [p.stem for p in paths] == sorted([picture(1).hash, picture(2).hash])
    before = [p.stat().st_mtime_ns for p in paths]
    files.write(1, [played_group(3, picture_of=1)])
    TrajectoryFiles(tmp_path, modalities).write(2, [played_group(4, picture_of=2)])
    assert [p.stat().st_mtime_ns for p in paths] == before


def test_a_medium_left_empty_by_a_crash_is_written_again(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    TrajectoryFiles(tmp_path, modalities).write(0, [played_group(0, picture_of=1)])
    [path] = (tmp_path / "media").iterdir()
    path.write_bytes(b"")
    files = TrajectoryFiles(tmp_path, modalities)
    files.write(0, [played_group(0, picture_of=1)])
    assert files.media("image", picture(1).hash).hash == picture(1).hash


def test_an_altered_medium_is_found(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    files = TrajectoryFiles(tmp_path, modalities)
    files.write(0, [played_group(0, picture_of=1)])
    [path] = (tmp_path / "media").iterdir()
    path.write_bytes(modalities["image"].dump(picture(2))[1])
    with pytest.raises(CheckpointError, match=f"was altered: its content now has the hash {picture(2).hash}"):
        files.media("image", picture(1).hash)
    path.write_bytes(b"no picture")
    with pytest.raises(CheckpointError, match="cannot be read any more"):
        files.media("image", picture(1).hash)


def test_a_missing_medium_says_what_to_set(tmp_path: Path, modalities: dict[MediaKind, Modality]) -> None:
    files = TrajectoryFiles(tmp_path, modalities, media=False)
    files.write(0, [played_group(0, picture_of=1)])
    assert not (tmp_path / "media").exists()
    with pytest.raises(CheckpointError, match=r"there is no image .*trajectories\.media"):
        files.media("image", picture(1).hash)


def test_files_and_bytes_are_decoded_by_whoever_knows_them(
    tmp_path: Path, modalities: dict[MediaKind, Modality]
) -> None:
    content = modalities["image"].dump(picture(1))[1]
    path, broken = tmp_path / "a.png", tmp_path / "broken.png"
    path.write_bytes(content)
    broken.write_bytes(b"no picture")
    group = with_messages(played_group(0, members=1), Image(path), Image(content), Image(broken))
    files = TrajectoryFiles(tmp_path / "t", modalities)
    files.write(0, [group])
    parts = lines(tmp_path / "t", 0)[0]["task"]["messages"][0]["parts"]
    assert parts[0] == {"type": "image", "path": str(path), "hash": picture(1).hash}
    assert parts[1] == {"type": "image", "hash": picture(1).hash}
    assert parts[2]["path"] == str(broken) and "broken.png" in parts[2]["unreadable"]
    assert [p.stem for p in (tmp_path / "t" / "media").iterdir()] == [picture(1).hash]

    asked = []

    def decode(part: MediaPart) -> Decoded:
        asked.append(part)
        return picture(5)

    TrajectoryFiles(tmp_path / "u", modalities, decode=decode).write(0, [group])
    assert [p.stem for p in (tmp_path / "u" / "media").iterdir()] == [picture(5).hash] and asked


def test_a_kind_that_nothing_reads(tmp_path: Path) -> None:
    TrajectoryFiles(tmp_path, {}).write(0, [played_group(0, picture_of=1)])
    (tmp_path / "media" / f"{picture(1).hash}.png").write_bytes(b"x")
    with pytest.raises((DataError, CheckpointError), match="no modality of this run reads image"):
        TrajectoryFiles(tmp_path, {}).media("image", picture(1).hash)
