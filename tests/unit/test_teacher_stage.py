"""The stage ``teacher``: its columns against a plain forward's, and the models that it and a reference refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from relax_core.config.schema import ComponentSection, SamplingSection
from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import ModelAdapter, Row
from relax_core.media import MediaStore
from relax_core.models import hf
from relax_core.models.config import TextConfig, TinyModel
from relax_core.models.text import TextAdapter, tiny_qwen3
from relax_core.models.words import word_tokenizer
from relax_core.setup import StageSetup
from relax_core.testing.stages import columns_of, plain_logprobs
from relax_core.testing.tiny import tiny_adapter
from relax_core.testing.training import row, tiny_run
from relax_core.torch.model_stage import vocabulary_problem
from relax_core.torch.optim import named_tensors
from relax_core.torch.reference import Reference
from relax_core.torch.stage_config import ReferenceConfig, TeacherConfig
from relax_core.torch.teacher import Teacher
from relax_core.transports import CopyTransport
from relax_core.types import MediaRef, Version

TEACHER = frozenset({"teacher_logprobs", "topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs"})
WORDS = ("last", "of", "cat", "dog")
TINY = {"words": list(WORDS), "hidden": 32, "layers": 1}
TOKENS = 11
"""0 padding, 1 end, 2 unknown, 3 to 6 roles, 7 to 10 words."""


def setup_of(adapter: ModelAdapter, columns: frozenset[str], temperature: float = 1.0) -> StageSetup:
    run = tiny_run(sampling=SamplingSection(temperature=temperature))
    return StageSetup(run, adapter, adapter.media, columns)


def teacher(
    adapter: ModelAdapter, columns: frozenset[str], model: ComponentSection, temperature: float = 1.0, **settings: Any
) -> Teacher:
    return Teacher(TeacherConfig(model=model, device="cpu", **settings), setup_of(adapter, columns, temperature))


def text_section(**tiny: Any) -> ComponentSection:
    return ComponentSection.model_validate({"id": "text", "tiny": TINY | tiny})


def text_adapter(**tiny: Any) -> TextAdapter:
    config = TextConfig(tiny=TinyModel(**{**TINY, "words": WORDS, **tiny}))
    return TextAdapter(config, MediaStore({}, max_bytes=1 << 20))


def text_rows(adapter: TextAdapter) -> list[Row]:
    allowed = [i for i in range(adapter.vocab_size) if i not in adapter.banned_token_ids]
    return [row("g/0/0", allowed[:3], allowed[2:6]), row("g/1/0", allowed[:3], allowed[4:8], [1, 0, 0, 1])]


def test_a_teacher_scores_with_its_own_weights_and_the_students_bans() -> None:
    student = text_adapter(seed=0)
    banned_word = next(i for i in range(student.vocab_size) if i not in (*student.banned_token_ids, *student.stop_ids))
    student.banned_token_ids = (*student.banned_token_ids, banned_word)
    rows = text_rows(student)
    stage = teacher(student, TEACHER, text_section(seed=5, layers=2), temperature=0.5, top_k=3)
    assert stage.adapter is not student and stage.adapter.media is student.media
    made = columns_of(stage, rows)
    model = text_adapter(seed=5, layers=2).load("cpu", torch.float32)
    for line in rows:
        found = made[line.id]
        assert set(found) == TEACHER
        plain_SV = plain_logprobs(student, model, line, 0.5).detach().numpy()
        allowed = np.setdiff1d(np.arange(student.vocab_size), student.banned_token_ids)
        full = found["teacher_full_logprobs"]
        assert full.shape == plain_SV.shape and full.dtype == np.float32
        assert full[:, allowed] == pytest.approx(plain_SV[:, allowed], abs=1e-5)
        assert (full[:, list(student.banned_token_ids)] < -1e8).all()
        wanted = np.sort(plain_SV, 1)[:, ::-1][:, :3]
        assert found["topk_ids"].dtype == np.int32 and found["topk_ids"].shape == wanted.shape
        assert found["teacher_topk_logprobs"] == pytest.approx(wanted, abs=1e-5)
        assert np.take_along_axis(plain_SV, found["topk_ids"].astype(int), 1) == pytest.approx(wanted, abs=1e-5)
        mask = line.columns["mask"] > 0
        own = np.take_along_axis(plain_SV, line.columns["tokens"][mask].astype(int)[:, None], 1)[:, 0]
        assert found["teacher_logprobs"][mask] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("columns", [{"teacher_logprobs"}, {"topk_ids", "teacher_topk_logprobs"}])
def test_a_teacher_makes_only_what_was_asked_for(columns: set[str]) -> None:
    student = text_adapter()
    made = columns_of(teacher(student, frozenset(columns), text_section(), top_k=2), text_rows(student))
    assert all(set(found) == columns for found in made.values())


# --- vocabularies that are padded otherwise ---------------------------------------------------------------------------


def padded(folder: Path, size: int, seed: int = 0, words: Sequence[str] = WORDS, special: str = "") -> ComponentSection:
    """A model whose vocabulary has ``size`` rows, whatever its tokenizer has; those of padding are loud."""
    tokenizer = word_tokenizer(words)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    config = tiny_qwen3(TinyModel(words=tuple(words), hidden=32, layers=1), tokenizer)
    config.vocab_size = size
    with hf.seeded(seed):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] *= 10
    hf.save_pretrained(model, tokenizer, folder)
    return ComponentSection.model_validate({"id": "text", "path": str(folder)})


def padded_adapter(folder: Path, size: int, **settings: Any) -> TextAdapter:
    padded(folder, size, **settings)
    return TextAdapter(TextConfig(path=folder), MediaStore({}, max_bytes=1 << 20))


def common_logprobs(folder: Path, line: Row, allowed: Sequence[int], temperature: float) -> torch.Tensor:
    """(S, A): a log-softmax over the allowed tokens alone."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(line.columns["tokens"].astype(np.int64))
    with torch.no_grad():
        logits_TV = model(input_ids=tokens[None], use_cache=False).logits[0].double()
    at = np.flatnonzero(line.columns["mask"]) - 1
    logprobs_SA: torch.Tensor = (logits_TV[at][:, list(allowed)] / temperature).log_softmax(-1)
    return logprobs_SA


@pytest.mark.parametrize(("ours", "theirs"), [(13, 17), (TOKENS, 17), (17, 13), (17, TOKENS)])
def test_log_probs_are_those_of_the_tokens_that_both_have(tmp_path: Path, ours: int, theirs: int) -> None:
    student, section = padded_adapter(tmp_path / "ours", ours), padded(tmp_path / "theirs", theirs, seed=5)
    student.banned_token_ids = (*student.banned_token_ids, 4)
    allowed = [1, 3, 5, 6, 7, 8, 9, 10]
    rows = [row("g/0/0", [0, 3, 7], [5, 9, 1]), row("g/1/0", [0, 3, 7], [8, 10, 3, 1], [1, 0, 0, 1])]
    silent = row("g/2/0", [0, 3, 7], [8], [0], units=0.0)
    stage = teacher(student, TEACHER, section, temperature=0.5, top_k=len(allowed))
    reference = Reference(
        ReferenceConfig(model=section, device="cpu"), setup_of(student, frozenset({"ref_logprobs"}), 0.5)
    )
    made, referred = columns_of(stage, [*rows, silent]), columns_of(reference, [*rows, silent])
    for line in rows:
        found, mask = made[line.id], line.columns["mask"] > 0
        wanted = common_logprobs(tmp_path / "theirs", line, allowed, 0.5).numpy()
        full = found["teacher_full_logprobs"]
        assert full.shape == (mask.sum(), ours) and full.dtype == np.float32 and full.flags.c_contiguous
        assert full[:, allowed] == pytest.approx(wanted, abs=1e-5)
        assert (np.delete(full, allowed, 1) == -1e9).all()
        order = np.argsort(-wanted, 1)
        assert (found["topk_ids"] == np.array(allowed)[order]).all()
        assert found["teacher_topk_logprobs"] == pytest.approx(np.take_along_axis(wanted, order, 1), abs=1e-5)
        sampled = [allowed.index(token) for token in line.columns["tokens"][mask]]
        own = wanted[np.arange(len(sampled)), sampled]
        assert found["teacher_logprobs"][mask] == pytest.approx(own, abs=1e-5)
        assert referred[line.id]["ref_logprobs"].tobytes() == found["teacher_logprobs"].tobytes()
    assert made[silent.id]["teacher_full_logprobs"].shape == (0, ours)
    assert set(student.banned_token_ids) == {0, 2, 4, *range(TOKENS, ours)}, "the student's own are as they were"


def test_tokens_that_only_the_other_model_has_take_no_part(tmp_path: Path) -> None:
    student = text_adapter()
    section = padded(tmp_path, 14, seed=5, words=(*WORDS, "sun"))
    line = row("g/0/0", [0, 3, 7], [5, 9, 1])
    allowed = [i for i in range(TOKENS) if i not in (0, 2)]
    found = columns_of(teacher(student, TEACHER, section, top_k=9), [line])[line.id]
    wanted = common_logprobs(tmp_path, line, allowed, 1.0).numpy()
    assert found["teacher_full_logprobs"][:, allowed] == pytest.approx(wanted, abs=1e-5)
    assert set(found["topk_ids"].flatten().tolist()) == set(allowed)


def test_what_only_the_student_has_must_be_padding(tmp_path: Path) -> None:
    """A special token is banned, and yet it stands in prompts; a stop is sampled, whatever the tokenizer knows."""
    word = padded_adapter(tmp_path / "word", 16, words=(*WORDS, "sun", "moon"))
    special = padded_adapter(tmp_path / "special", 16, special="<|tool|>")
    stop = tmp_path / "stop"
    padded(stop, 16)
    (stop / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 14]}))
    stopping = TextAdapter(TextConfig(path=stop), MediaStore({}, max_bytes=1 << 20))
    assert TOKENS in special.banned_token_ids and 14 not in stopping.banned_token_ids
    for student, size, said in [
        (word, 12, "lacks token 12, 'moon' there"),
        (special, TOKENS, "lacks token 11, '<|tool|>' there"),
        (stopping, 12, "lacks token 14, which may be sampled"),
    ]:
        section = padded(tmp_path / "theirs", size, words=(*WORDS, "sun") if student is word else WORDS)
        with pytest.raises(ConfigError) as error:
            teacher(student, frozenset({"teacher_logprobs"}), section)
        assert str(error.value) == (
            f"stages.teacher.model: has a vocabulary of {size} tokens, the run's model one of 16, and {said}; their "
            "log-probs cannot be compared: take a model with the run's vocabulary"
        )


def test_common_tokens_are_compared_whatever_the_sizes(tmp_path: Path) -> None:
    section = padded(tmp_path / "theirs", 16, words=("last", "of", "dog", "cat"))
    for size in (TOKENS, 13, 20):
        student = padded_adapter(tmp_path / str(size), size)
        with pytest.raises(ConfigError, match=r"model: has 'dog' as token 9, the run's model has 'cat'"):
            teacher(student, frozenset({"teacher_logprobs"}), section)


def test_without_tokenizers_sizes_must_be_equal() -> None:
    student, other = tiny_adapter(), tiny_adapter()
    assert vocabulary_problem(student, other) is None
    other.vocab_size += 3
    said = f"vocabulary of {other.vocab_size} tokens, the run's model one of {student.vocab_size}, and nothing tells "
    for line in (vocabulary_problem(student, other), vocabulary_problem(text_adapter(), other)):
        assert line and "nothing tells whether id" in line
    assert said + f"whether id {student.vocab_size}, which one" in (vocabulary_problem(student, other) or "")


@pytest.mark.parametrize(("ours", "theirs"), [(13, 17), (17, 13)])
def test_a_refresh_needs_equal_sizes(tmp_path: Path, ours: int, theirs: int) -> None:
    student, section = padded_adapter(tmp_path / "ours", ours), padded(tmp_path / "theirs", theirs)
    transport = CopyTransport(CopyTransport.Config())
    weights = named_tensors(student.load("cpu", torch.float32))
    update = transport.publish(Version(0, 0), [(name, tensor.detach()) for name, tensor in weights])
    columns = frozenset({"ref_logprobs"})
    with pytest.raises(ConfigError, match=rf"refresh: found 5.* shape \({ours}, 32\) there and \({theirs}, 32\) here"):
        config = ReferenceConfig(model=section, device="cpu", refresh=5)
        asyncio.run(Reference(config, setup_of(student, columns)).load_weights(update))
    asyncio.run(
        Reference(ReferenceConfig(model=section, device="cpu"), setup_of(student, columns)).load_weights(update)
    )


# --- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (WORDS[:-1], "vocabulary of 10 tokens, the run's model one of 11, and lacks token 10, 'dog' there;"),
        (("last", "of", "dog", "cat"), r"'dog' as token 9, the run's model has 'cat'"),
    ],
)
def test_another_vocabulary_is_refused(words: tuple[str, ...], said: str) -> None:
    student, section = text_adapter(), text_section(words=list(words))
    with pytest.raises(ConfigError, match=f"stages.teacher.model: has .*{said}"):
        teacher(student, frozenset({"teacher_logprobs"}), section)
    with pytest.raises(ConfigError, match=f"stages.reference.model: has .*{said}"):
        Reference(ReferenceConfig(model=section), setup_of(student, frozenset({"ref_logprobs"})))
    run = tiny_run(stages=(ComponentSection(id="teacher"),))
    found = Teacher.deep_problems(TeacherConfig(model=section), run, student, frozenset({"teacher_logprobs"}))
    assert len(found) == 1 and found[0].startswith("stages.0.model: has")


def test_top_k_stays_within_what_the_policy_may_sample() -> None:
    """Of 11 tokens all but padding and unknown; a larger vocabulary of the teacher's changes nothing."""
    student, section = text_adapter(), text_section(words=[*WORDS, "sun"])
    columns = frozenset({"topk_ids", "teacher_topk_logprobs"})
    said = "top_k: found 10, but the policy may sample 9 of its vocabulary's 11 tokens: ask for no more"
    for model in (text_section(), section):
        with pytest.raises(ConfigError) as error:
            teacher(student, columns, model, top_k=10)
        assert str(error.value) == f"stages.teacher.{said}"
        config = TeacherConfig(model=model, top_k=10)
        run = tiny_run(stages=(ComponentSection(id="teacher"),))
        assert Teacher.deep_problems(config, run, student, columns) == [f"stages.0.{said}"]
        teacher(student, columns, model, top_k=9)
    teacher(student, frozenset({"teacher_logprobs"}), text_section())  # top_k is not used


def test_media_that_the_model_does_not_read_are_refused() -> None:
    stage = teacher(text_adapter(), frozenset({"teacher_logprobs"}), text_section())
    lines = [row("g/0/0", [7, 8], [9], media=[MediaRef("image", "key", 0, 1)])]
    with pytest.raises(DataError, match=r"stages.teacher.model: row g/0/0 holds image, which this model does not read"):
        columns_of(stage, lines)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
