"""The mappings in configs/data, each with a small file that has the shape of its data set."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image as Pillow

from relax_core.config.validation import validate
from relax_core.media import MediaStore
from relax_core.types import Audio, Image, Message, Task, Text, Video, user
from relax_envs.data.columns import read_columns
from relax_envs.single_turn import SingleTurn
from relax_modalities.audio import Audio as AudioModality
from relax_modalities.image import Image as ImageModality
from relax_modalities.video import Video as VideoModality

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "data"


def tasks_of(preset: str, **source: Any) -> list[Task]:
    source = {"columns": str(PRESETS / f"{preset}.yaml"), **{k: str(v) for k, v in source.items()}}
    found = SingleTurn(validate(SingleTurn.Config, {"data": source})).tasks("train")
    return list(found)


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def jpeg(grey: int) -> bytes:
    content = io.BytesIO()
    Pillow.new("L", (16, 12), grey).save(content, "JPEG")
    return content.getvalue()


def decoded_shapes(task: Task) -> list[tuple[int, ...]]:
    """The media are real: what the built-in decoders make of them."""
    decoders = {
        "image": ImageModality(ImageModality.Config()),
        "audio": AudioModality(AudioModality.Config()),
        "video": VideoModality(VideoModality.Config()),
    }
    store = MediaStore(decoders, 10**7)
    return [store.decode(part).data.shape for message in task.messages for part in message.media()]


def test_every_preset_is_tested() -> None:
    tested = {
        "gsm8k",
        "dapo-math-17k",
        "dapo-math-17k-label",
        "geo3k",
        "multimodal-open-r1-8k-verified",
        "avqa-r1-6k",
        "nextqa",
    }
    assert {path.stem for path in PRESETS.glob("*.yaml")} == tested
    for name in tested:
        read_columns(PRESETS / f"{name}.yaml")


def test_gsm8k(tmp_path: Path) -> None:
    rows = [
        {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
        {"question": "How much?", "answer": "That is a lot.\n#### 1,234"},
    ]
    for split in ("train", "test"):
        parquet(tmp_path / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet", rows)
    tasks = tasks_of("gsm8k", path=tmp_path / "gsm8k" / "main", hf_split="train")
    assert tasks == [Task("1", (user(rows[0]["question"]),), "72"), Task("2", (user("How much?"),), "1,234")]


def test_dapo_math(tmp_path: Path) -> None:
    content = "Solve the following math problem step by step. What is $1+1$?"
    row = {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }
    tasks = tasks_of("dapo-math-17k", path=parquet(tmp_path / "dapo-math-17k.parquet", [row, row]))
    about = {"data_source": "math_dapo", "ability": "MATH", **row["extra_info"]}  # type: ignore[dict-item]
    assert tasks == [Task(str(i), (user(content),), "2", about) for i in (1, 2)], "a question may be there twice"


@pytest.mark.parametrize("prompt", ["What is $1+1$?", [{"role": "user", "content": "What is $1+1$?"}]])
def test_dapo_math_with_labels(prompt: Any, tmp_path: Path) -> None:
    path = tmp_path / "dapo-math-17k.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "label": "2"}))
    assert tasks_of("dapo-math-17k-label", path=path) == [Task("1", (user("What is $1+1$?"),), "2")]


def test_geo3k(tmp_path: Path) -> None:
    images = [{"bytes": jpeg(10), "path": None}]
    row = {"images": images, "problem": "<image>Find x.", "answer": "3"}
    parquet(tmp_path / "geo3k" / "data" / "train-00000-of-00001.parquet", [row])
    [task] = tasks_of("geo3k", path=tmp_path / "geo3k", hf_split="train")
    assert task == Task("1", (user(Image(jpeg(10)), "Find x."),), "3")
    assert decoded_shapes(task) == [(12, 16, 3)]


def test_multimodal_open_r1(tmp_path: Path) -> None:
    row = {
        "image": {"bytes": jpeg(10), "path": "a.jpg"},
        "problem": "Which of these? A. one B. two",
        "solution": "<think>It is two.</think>\n\n<answer>B</answer>",
        "original_question": "Which?",
        "original_answer": "Answer: B",
    }
    path = parquet(tmp_path / "train-00000-of-00001.parquet", [row])
    about = {"original_question": "Which?", "original_answer": "Answer: B"}
    [task] = tasks_of("multimodal-open-r1-8k-verified", path=path)
    assert task == Task("1", (user(Image(jpeg(10)), "Which of these? A. one B. two"),), "B", about)
    assert decoded_shapes(task) == [(12, 16, 3)]


def test_avqa_r1(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "audios").mkdir()
    (tmp_path / "images" / "sample_7.jpg").write_bytes(jpeg(10))
    soundfile.write(tmp_path / "audios" / "sample_7.wav", np.zeros(1600), 16000)
    row = {
        "problem_id": 7,
        "problem": "What is the main source of sound?",
        "data_type": "image_audio",
        "problem_type": "multiple choice",
        "options": ["A. aircraft", "B. train"],
        "solution": "<answer>B</answer>",
        "path": {"image": "images/sample_7.jpg", "audio": "audios/sample_7.wav"},
        "data_source": "OmniInstruct_v1-AVQA",
    }
    path = tmp_path / "omni_rl_format_train.json"
    path.write_text(json.dumps([row], indent=2))
    [task] = tasks_of("avqa-r1-6k", path=path)
    text = "What is the main source of sound?\nOptions:\nA. aircraft\nB. train"
    image, audio = Image(tmp_path / "images" / "sample_7.jpg"), Audio(tmp_path / "audios" / "sample_7.wav")
    about = {key: row[key] for key in ("data_type", "problem_type", "data_source")}
    assert task == Task("7", (user(image, audio, text),), "B", about)
    assert decoded_shapes(task) == [(12, 16, 3), (1600,)]


def clip(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 60 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def test_nextqa(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    clip(tmp_path / "videos" / "4010069381.mp4")
    row = {
        "video": 4010069381,
        "frame_count": 369,
        "width": 640,
        "height": 480,
        "question": "how do the two man play the instrument",
        "answer": 2,
        "qid": 6,
        "type": "CH",
        "a0": "roll the handle",
        "a1": "tap their feet",
        "a2": "strum the string",
        "a3": "hit with sticks",
        "a4": "pat with hand",
    }
    [task] = tasks_of("nextqa", path=parquet(tmp_path / "test.parquet", [row]))
    choices = [row[f"a{i}"] for i in range(5)]
    lines = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDE", choices, strict=True))
    text = f"how do the two man play the instrument?\n{lines}"
    assert task.messages == (Message("user", (Video(tmp_path / "videos" / "4010069381.mp4"), Text(text))),)
    assert (task.id, task.answer) == ("4010069381_6", "C")
    assert task.metadata == {"video": 4010069381, "qid": 6, "type": "CH", "choices": choices}
    [shape] = decoded_shapes(task)
    assert shape[1:] == (32, 32, 3)
