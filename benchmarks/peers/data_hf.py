"""The peer of the data benchmark: ``datasets`` streaming, Hugging Face processors, and workers of a torch DataLoader.

    python benchmarks/peers/data_hf.py --files 'DIR/*.parquet' --tokenizer DIR --workers 2 --out out.json

It does what Qwen3-Omni's processor does, with its parts and its settings: the class itself cannot be built without
torchvision. Sound is decoded by soundfile and resampled by soxr, as librosa does: the Audio feature's own decoder needs
torchcodec. Nothing here is Relax's.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import re
import sys
from itertools import chain, count
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.data_meter import Meter, arguments

PATCH, MERGE, RATE = 16, 2, 16_000
BUFFER = 1000
"""Rows that are shuffled among each other: the default of datasets."""
PREFETCH = 8
"""Rows prefetched by all workers together."""


class Process:
    """A row of the data set to what the model reads."""

    def __init__(self, tokenizer: Path) -> None:
        from transformers import AutoTokenizer, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        half = [0.5, 0.5, 0.5]
        self.image: Any = Qwen2VLImageProcessorPil(
            patch_size=PATCH,
            temporal_patch_size=2,
            merge_size=MERGE,
            image_mean=half,
            image_std=half,
            size={"shortest_edge": 56 * 56, "longest_edge": 3584 * 3584},
        )
        self.audio: Any = WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
            feature_size=128, sampling_rate=RATE, hop_length=160, n_fft=400, return_attention_mask=True
        )

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        pictures = self.image(row["images"], return_tensors="pt")
        sounds = self.audio(  # the arguments are the processor's: padded to the longest of the call, never to 30 s
            [sound(medium["bytes"]) for medium in row["audios"]],
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        text = self.tokenizer.apply_chat_template(messages(row), tokenize=False, add_generation_prompt=True)
        lengths = {
            "<|image_pad|>": [int(n) for n in pictures["image_grid_thw"].prod(-1) // MERGE**2],
            "<|audio_pad|>": [audio_tokens(int(n)) for n in sounds["attention_mask"].sum(-1)],
        }
        for token, repeats in lengths.items():
            pieces = text.split(token)
            text = pieces[0] + "".join(token * n + piece for n, piece in zip(repeats, pieces[1:], strict=True))
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return {
            "ids": ids,
            "pixels": pictures["pixel_values"],
            "grid": pictures["image_grid_thw"],
            "mel": sounds["input_features"],
            "mel_mask": sounds["attention_mask"],
        }


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt as a user's message with typed parts."""
    parts: list[dict[str, str]] = []
    for piece in re.split("(<image>|<audio>)", row["prompt"]):
        kind = piece.strip("<>")
        if kind in ("image", "audio"):
            parts.append({"type": kind, kind: ""})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return [{"role": "user", "content": parts}]


def sound(content: bytes) -> Any:
    """Mono float32 at the model's rate."""
    import soundfile

    samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if rate != RATE:
        import soxr

        samples = soxr.resample(samples, rate, RATE)
    return samples


def audio_tokens(frames: int) -> int:
    """The rule of Qwen3-Omni's processor: 13 tokens for each 100 frames, the rest halved three times."""
    rest = frames % 100
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + frames // 100 * 13


def data_set(pattern: str, shuffled: bool) -> Any:
    import datasets
    from datasets import Audio, Image, List

    datasets.disable_progress_bars()
    found = datasets.load_dataset("parquet", data_files=sorted(glob.glob(pattern)), split="train", streaming=True)
    if shuffled:
        found = found.shuffle(seed=0, buffer_size=BUFFER)
    return found.cast_column("images", List(Image())).cast_column("audios", List(Audio(decode=False)))


def loaded(pattern: str, process: Process, workers: int) -> Any:
    """Processed rows in a shuffled order, for ever."""
    from torch.utils.data import DataLoader

    rows = data_set(pattern, shuffled=True)
    rows = rows.map(process, remove_columns=rows.column_names)
    loader: Any = DataLoader(rows, batch_size=None, num_workers=workers, prefetch_factor=max(1, PREFETCH // workers))
    for epoch in count():
        rows.set_epoch(epoch)
        yield from loader


def probe(a: argparse.Namespace, process: Process) -> None:
    """What the first rows become, in the order of the files."""
    import numpy as np

    found: dict[str, Any] = {}
    for i, row in enumerate(data_set(a.files, shuffled=False).take(a.probe)):
        made = process(row)
        found |= {f"{name}-{i}": made[name].numpy() for name in ("ids", "pixels")}
        found |= {f"{name}-{i}": made[name].numpy()[0] for name in ("grid", "mel")}
    np.savez(a.out, **found)


def work(a: argparse.Namespace) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)
    process = Process(a.tokenizer)
    if a.probe:
        probe(a, process)
        return
    meter = Meter(a.warmup, a.rows)
    rows = loaded(a.files, process, a.workers)
    first = next(rows)  # by then the workers are forked: with a second thread about, that might hang
    with meter.watching():
        for row in chain([first], rows):
            if not meter.row(len(row["ids"]), sum(row[name].nbytes for name in ("pixels", "grid", "mel"))):
                break
        rows.close()  # ends the workers
    meter.write(a.out)


if __name__ == "__main__":
    work(arguments(__doc__))
