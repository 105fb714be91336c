"""The stage ``teacher``: its columns against a plain forward's, and the models that it and a reference refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from relax_core.bus import Claim, Holder
from relax_core.config.schema import ComponentSection, SamplingSection
from relax_core.errors import ConfigError, DataError
from relax_core.interfaces import ModelAdapter, Row
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig, TinyModel
from relax_core.models.text import TextAdapter
from relax_core.setup import StageSetup
from relax_core.testing.training import row, tiny_run
from relax_core.torch.model_stage import ModelStage
from relax_core.torch.reference import Reference
from relax_core.torch.stage_config import ReferenceConfig, TeacherConfig
from relax_core.torch.teacher import Teacher
from relax_core.transports import CopyTransport
from relax_core.types import MediaRef

TEACHER = frozenset({"teacher_logprobs", "topk_ids", "teacher_topk_logprobs", "teacher_full_logprobs"})
WORDS = ("last", "of", "cat", "dog")
TINY = {"words": list(WORDS), "hidden": 32, "layers": 1}


def setup_of(adapter: ModelAdapter, columns: frozenset[str], temperature: float = 1.0) -> StageSetup:
    run = tiny_run(sampling=SamplingSection(temperature=temperature))
    roles: Any = SimpleNamespace(adapter=adapter, transport=CopyTransport(CopyTransport.Config()))
    return StageSetup(run, roles, columns)


def teacher(
    adapter: ModelAdapter, columns: frozenset[str], model: ComponentSection, temperature: float = 1.0, **settings: Any
) -> Teacher:
    return Teacher(TeacherConfig(model=model, device="cpu", **settings), setup_of(adapter, columns, temperature))


def columns_of(stage: ModelStage, rows: Sequence[Row]) -> dict[str, Any]:
    claim = Claim(stage.name, Holder(stage.name, 0), tuple(rows), tuple(dict.fromkeys(r.group for r in rows)))
    return dict(asyncio.run(stage.run(claim)))


def plain_logprobs(adapter: ModelAdapter, model: torch.nn.Module, line: Row, temperature: float) -> torch.Tensor:
    """(S, V): of every token at each sampled place of one row, by the definition: no layouts, no chunks."""
    ids = torch.tensor(line.columns["tokens"].astype(np.int64))
    logits_TV = cast(Any, model)(input_ids=ids[None], use_cache=False).logits[0].double() / temperature
    logits_TV[:, list(adapter.banned_token_ids)] = -1e30
    sampled = np.flatnonzero(line.columns["mask"])
    logprobs_SV: torch.Tensor = logits_TV.log_softmax(-1)[sampled - 1]
    return logprobs_SV


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


# --- what they refuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*WORDS, "sun"), r"vocabulary of 12 tokens, the run's model one of 11.*with the run's vocabulary"),
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


def test_top_k_stays_within_the_vocabulary() -> None:
    student = text_adapter()
    columns = frozenset({"topk_ids", "teacher_topk_logprobs"})
    with pytest.raises(ConfigError, match=r"stages.teacher.top_k: found 64, the vocabulary has 11 tokens"):
        teacher(student, columns, text_section())
    teacher(student, columns, text_section(), top_k=11)
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
