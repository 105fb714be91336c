"""The stage ``teacher``: what another model says of the tokens that the policy sampled, for distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.torch.model_stage import ModelStage, allowed_count
from relax_core.torch.sampling import BANNED
from relax_core.torch.stage_config import ModelStageConfig, TeacherConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from relax_core.bus import Claim
    from relax_core.interfaces import Columns, ModelAdapter
    from relax_core.setup import StageSetup


class Teacher(ModelStage):
    """Makes of these columns those that the algorithm needs, S being the row's sampled tokens and V the policy's
    vocabulary:

    - ``teacher_logprobs``, float32 (T,): of the sampled tokens, 0 elsewhere;
    - ``topk_ids``, int32 (S, top_k), and ``teacher_topk_logprobs``, float32 (S, top_k): the teacher's most probable
      tokens at each sampled place, falling;
    - ``teacher_full_logprobs``, float32 (S, V): of every token; about -1e9 for banned ones.

    All at the run's temperature and without the tokens that are banned for the policy, or that the policy lacks. The
    teacher must have the policy's tokens; its vocabulary may be padded to another size. Media reach it as the features
    and positions that the policy's own processing made.
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
        self.width = setup.adapter.vocab_size

    async def run(self, claim: Claim) -> Mapping[str, Columns]:
        made = await super().run(claim)
        if self.width == self.adapter.vocab_size or "full_logprobs" not in self.outputs:
            return made
        name = "teacher_full_logprobs"
        return {id: {**columns, name: at_width(columns[name], self.width)} for id, columns in made.items()}

    @classmethod
    def model_problems(
        cls, config: ModelStageConfig, student: ModelAdapter, own: ModelAdapter, columns: frozenset[str]
    ) -> Iterator[str]:
        yield from super().model_problems(config, student, own, columns)
        assert isinstance(config, TeacherConfig)
        allowed = allowed_count(student)
        if {"topk_ids", "teacher_topk_logprobs"} & columns and config.top_k > allowed:
            yield (
                f"top_k: found {config.top_k}, but the policy may sample {allowed:,} of its vocabulary's "
                f"{student.vocab_size:,} tokens: ask for no more"
            )


def at_width(logprobs_SV: NDArray[Any], width: int) -> NDArray[Any]:
    """Log-probs of a vocabulary as those of one that is padded otherwise (S, width); tokens of padding are banned."""
    added = max(0, width - logprobs_SV.shape[1])
    padded: NDArray[Any] = np.pad(logprobs_SV[:, :width], ((0, 0), (0, added)), constant_values=BANNED)
    return padded
