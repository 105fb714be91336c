"""The stage ``teacher``: what another model says of the tokens that the policy sampled, for distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_core.torch.model_stage import ModelStage
from relax_core.torch.stage_config import ModelStageConfig, TeacherConfig

if TYPE_CHECKING:
    from relax_core.interfaces import ModelAdapter
    from relax_core.setup import StageSetup


class Teacher(ModelStage):
    """Makes of these columns those that the algorithm needs, S being the row's sampled tokens and V the vocabulary:

    - ``teacher_logprobs``, float32 (T,): of the sampled tokens, 0 elsewhere;
    - ``topk_ids``, int32 (S, top_k), and ``teacher_topk_logprobs``, float32 (S, top_k): the teacher's most probable
      tokens at each sampled place, falling;
    - ``teacher_full_logprobs``, float32 (S, V): of every token; about -1e9 for banned ones.

    All at the run's temperature and without the tokens that are banned for the policy. The teacher must have the
    policy's vocabulary. Media reach it as the features and positions that the policy's own processing made.
    """

    name = "teacher"
    sources = {
        "teacher_logprobs": ("logprobs", "logprobs"),
        "topk_ids": ("topk", "topk_ids"),
        "teacher_topk_logprobs": ("topk", "topk_logprobs"),
        "teacher_full_logprobs": ("full_logprobs", "full_logprobs"),
    }

    def __init__(self, config: TeacherConfig, setup: StageSetup) -> None:
        super().__init__(config, setup)
        if "topk" in self.outputs:
            self.top_k = config.top_k

    @classmethod
    def model_problems(
        cls, config: ModelStageConfig, student: ModelAdapter, own: ModelAdapter, columns: frozenset[str]
    ) -> Iterator[str]:
        yield from super().model_problems(config, student, own, columns)
        assert isinstance(config, TeacherConfig)
        if {"topk_ids", "teacher_topk_logprobs"} & columns and config.top_k > student.vocab_size:
            yield f"top_k: found {config.top_k}, the vocabulary has {student.vocab_size:,} tokens: ask for no more"
