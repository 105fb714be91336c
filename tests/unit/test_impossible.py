"""Each combination of settings that cannot work is explained in one line, when the run file is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from relax_core.config.resolve import resolve, resolved
from relax_core.errors import ConfigError
from relax_core.plugins import activate
from relax_core.testing.runs import TEXT_RUN

KL = {"coefficient": 0.01}
TEACHER = {"id": "teacher", "model": {"id": "text", "tiny": {"words": ["a", "b"]}}}


def problems(algorithm: dict[str, Any], run: dict[str, Any]) -> tuple[str, ...]:
    """What is said of ``TEXT_RUN`` with this algorithm and these changes."""
    raw = copy.deepcopy(TEXT_RUN) | {"plugins": ["algorithms-extra"], "algorithm": algorithm} | run
    try:
        resolve(raw)
    except ConfigError as error:
        return error.problems
    return ()


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # groups
    ({"id": "grpo"}, {"group_size": 1}, "algorithm: group_size is 1, but grpo compares the plays of a task"),
    ({"id": "rloo"}, {"group_size": 1}, "algorithm: group_size is 1, but rloo compares"),
    ({"id": "maxrl"}, {"group_size": 1}, "algorithm: group_size is 1, but maxrl compares"),
    ({"id": "reinforce++", "baseline": True}, {"group_size": 1}, "algorithm: baseline with group_size 1"),
    ({"id": "opd", "reward_weight": 1.0}, {"group_size": 1, "stages": [TEACHER]}, "algorithm: group_size is 1"),
    ({"id": "reinforce++"}, {"group_size": 1, "callbacks": [{"id": "dynamic-sampling"}]}, "callbacks.0: group_size"),
    # aggregation
    ({"id": "dr-grpo"}, {}, "algorithm: aggregation is 'constant' and constant is None: set constant to the response"),
    ({"id": "grpo", "constant": 5}, {}, "algorithm: aggregation is 'token-mean' and constant is 5: leave constant out"),
    # settings of other algorithms
    ({"id": "sapo", "clip_low": 0.1}, {}, "algorithm: clip_low: sapo clips nothing"),
    ({"id": "sapo", "dual_clip": 3.0}, {}, "algorithm: dual_clip: sapo's gate bounds"),
    ({"id": "cispo", "dual_clip": 3.0}, {}, "algorithm: dual_clip: cispo's weight is bounded"),
    ({"id": "rloo", "clip": False, "clip_low": 0.1}, {}, "algorithm: clip_low: clip is false"),
    ({"id": "gmpo", "clip_high": 0.3}, {}, "algorithm: clip_high: gmpo clips the log"),
    ({"id": "m2po", "correction": {}}, {}, "algorithm: correction: the loss of m2po already weighs"),
    ({"id": "reinforce++", "whiten": False}, {}, "algorithm.whiten: found false; the step's mean is the baseline"),
    (
        {"id": "gdpo", "weights": {"exact": 1.0}},
        {},
        "algorithm: weights: the reward 'format' has weight 0.2, which gdpo",
    ),
    (
        {"id": "gdpo", "weights": {"exact": 0.0, "format": 0.0}},
        {},
        "algorithm: weights: every reward has weight 0",
    ),
    (
        {"id": "gdpo", "weights": {"exact": 0.8, "format": 0.2}},
        {"callbacks": [{"id": "overlong", "buffer": 1}]},
        "algorithm: callback overlong changes the sum of rewards",
    ),
    (
        {"id": "maxrl"},
        {"callbacks": [{"id": "overlong", "buffer": 1}]},
        "algorithm: callback overlong makes rewards neg",
    ),
    (
        {"id": "maxrl"},
        {"rewards": [{"id": "exact"}, {"id": "format", "weight": -0.1, "words": 1}]},
        "algorithm: the reward 'format' has weight -0.1",
    ),
    ({"id": "gdpo", "whiten": True}, {}, "algorithm: whiten: gdpo always divides"),
    ({"id": "opd", "whiten": True}, {"stages": [TEACHER]}, "algorithm: whiten: concerns the advantages of the reward"),
    # KL
    ({"id": "grpo", "kl": KL | {"estimator": "k1"}}, {}, "algorithm.kl: estimator: k1 in the loss"),
    ({"id": "grpo", "kl": KL | {"place": "reward", "estimator": "k3"}}, {}, "algorithm.kl: estimator: k3 as a reward"),
    ({"id": "grpo", "kl": KL | {"place": "reward", "unbiased": True}}, {}, "algorithm.kl: unbiased: is for place"),
    ({"id": "gdpo", "kl": KL | {"place": "reward"}}, {}, "algorithm: kl.place: gdpo normalises"),
    ({"id": "opd", "kl": KL | {"place": "reward"}}, {"stages": [TEACHER]}, "algorithm: kl.place: 'reward' with"),
    ({"id": "grpo"}, {"stages": [{"id": "reference"}]}, "stages.0: reference makes ref_logprobs, which grpo with its"),
    # the old policy
    ({"id": "grpo", "correction": {}}, {"old": "engine"}, "algorithm: correction with old: engine"),
    ({"id": "grpo", "rejection": {"low": 0.9, "high": 1.1}}, {"old": "engine"}, "algorithm: rejection with old"),
    ({"id": "m2po"}, {"old": "engine"}, "algorithm: old is engine, but m2po"),
    ({"id": "grpo", "opsm": 0.1}, {}, "algorithm: opsm with updates_per_step 1 and old: recompute"),
    # corrections
    ({"id": "grpo", "correction": {"low": 0.5}}, {}, "algorithm.correction: low: truncate has no lower bound"),
    ({"id": "grpo", "correction": {"kind": "decoupled", "high": 2.0}}, {}, "algorithm.correction: high: decoupled"),
    ({"id": "grpo", "correction": {"kind": "mask", "low": 2.0}}, {}, "algorithm.correction: low 2.0, high 5.0: 1,"),
    ({"id": "grpo", "rejection": {"low": 1.1, "high": 2.0}}, {}, "algorithm.rejection: low 1.1, high 2.0: 1,"),
    # critic and teacher
    ({"id": "ppo", "critic_warmup": 6}, {}, "algorithm: critic_warmup is 6 and steps is 6"),
    ({"id": "grpo"}, {"trainer": {"critic": {"lr": 1e-3}}}, "trainer.critic: lr differs from the default, but the alg"),
    (
        {"id": "opd"},
        {"trainer": {"critic": {"lr": 1e-3, "clip": None}}, "stages": [TEACHER]},
        "trainer.critic: lr, clip differ from the default",
    ),
    (
        {"id": "opd"},
        {},
        "stages: opd needs teacher_logprobs of the stage 'teacher', whose model must be given: write stages: [{id: "
        "teacher, model: {...}}]",
    ),
    ({"id": "opd"}, {"stages": [{"id": "teacher"}]}, "stages.0.model: is missing"),
    ({"id": "opd", "divergence": "jsd"}, {"stages": [TEACHER]}, "algorithm: divergence: jsd compares distributions"),
    ({"id": "opd", "over": "full", "beta": 0.3}, {"stages": [TEACHER]}, "algorithm: beta: is for divergence 'jsd'"),
    ({"id": "grpo"}, {"stages": [TEACHER]}, "stages.0: teacher makes"),
    # shaping
    ({"id": "grpo"}, {"callbacks": [{"id": "overlong", "buffer": 9}]}, "callbacks.0: buffer"),
]


@pytest.mark.parametrize(("algorithm", "run", "line"), CASES, ids=[line for _, _, line in CASES])
def test_explained_in_one_line(algorithm: dict[str, Any], run: dict[str, Any], line: str) -> None:
    found = problems(algorithm, run)
    assert len(found) == 1 and "\n" not in found[0]
    assert line in found[0]


@pytest.mark.parametrize(
    ("algorithm", "run"),
    [
        ({"id": "ppo"}, {"group_size": 1}),
        ({"id": "ppo"}, {"trainer": {"critic": {"lr": 1e-3}}}),
        ({"id": "grpo"}, {"trainer": {"critic": {"lr": 1e-5, "clip": 1.0}}}),
        ({"id": "reinforce++"}, {"group_size": 1}),
        ({"id": "opd"}, {"group_size": 1, "stages": [TEACHER]}),
        ({"id": "grpo", "kl": KL}, {"stages": [{"id": "reference", "refresh": 3}]}),
        ({"id": "grpo", "opsm": 0.1}, {"old": "engine"}),
        ({"id": "grpo", "opsm": 0.1}, {"updates_per_step": 2}),
        ({"id": "cispo", "kl": KL | {"place": "reward"}, "correction": {"kind": "mask"}, "whiten": True}, {}),
    ],
    ids=str,
)
def test_what_works_together(algorithm: dict[str, Any], run: dict[str, Any]) -> None:
    assert problems(algorithm, run) == ()


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "dr-grpo": [{"constant": 3}],
    "rloo": [{}, {"clip": False}],
    "reinforce++": [{}, {"baseline": True, "kl": KL}],
    "gdpo": [{"weights": {"exact": 0.8, "format": 0.2}}],
}


@pytest.mark.parametrize("id", activate(["algorithms-extra"]).components("algorithms"))
def test_a_resolved_run_file_is_a_run_file(id: str) -> None:
    """It writes every default out, those that an algorithm refuses to have changed included."""
    stages = [TEACHER] if id == "opd" else []
    for settings in SETTINGS.get(id, [{}]):
        raw = copy.deepcopy(TEXT_RUN) | {"plugins": ["algorithms-extra"], "stages": stages}
        once = resolved(*resolve(raw | {"algorithm": {"id": id, **settings}}))
        assert resolved(*resolve(once)) == once
