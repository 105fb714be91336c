"""What the overlap benchmark concludes from what it measured.

The ideal of a design in which sampling and training overlap is that the slower of the two never stops:

    ideal = max(generate, train)                    seconds a step

    generate = busy seconds of the engine / steps   in the run of the same work and bound on staleness whose trainer
                                                    rests as long as it would compute: the engine has a machine of its
                                                    own. Busy: it decodes, reads prompts or takes weights over
    train    = (step - wait)                        mean over the steps of the run at staleness 0, in which the engine
                                                    mostly rests while the trainer works. step: from the end of a step
                                                    to the end of the next one, publication, journal and checkpoint
                                                    included; wait: the trainer waits for rows, seen from where it
                                                    computes

    reached  = ideal / step                         mean step of the run at staleness 2 (work A: 1)

Why it rests, and does not just let rows pass: groups that are being trained count in the bound on staleness. Without
them the engine would have more rows to decode at once, and need less time for each, than beside any trainer that works.

All three runs belong to one round, and train the same groups with the same lengths. The median of the rounds counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Found = dict[str, Any]
LEAST = 0.9


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def label(run: Found) -> str:
    """How tables call a setting."""
    if run["framework"] != "relax":
        return str(run["framework"])
    name = "colocate" if run["placement"] == "colocate" else f"separate@{run['staleness']}"
    return name if run["rest_s"] is None else f"{name}, resting trainer"


def generate(run: Found) -> float:
    """Busy seconds of the engines a step."""
    return float(sum(engine["busy_share"] for engine in run["engines"])) * mean(run["step_s"])


def train(run: Found) -> float:
    """Seconds a step in which the trainer does not wait for rows."""
    return mean(run["step_s"]) - mean(run["wait_s"])


def pick(found: Sequence[Found], **wanted: Any) -> Found | None:
    """The run with these values."""
    return next((r for r in found if all(r.get(key) == value for key, value in wanted.items())), None)


def ideal(of_round: Sequence[Found], work: str, staleness: int) -> dict[str, float] | None:
    """The formula above for one round; None while one of its runs is missing."""
    separate = {"work": work, "framework": "relax", "placement": "separate"}
    alone = next((r for r in of_round if r["work"] == work and r.get("rest_s") is not None), None)
    base = pick(of_round, **separate, staleness=0, rest_s=None)
    real = pick(of_round, **separate, staleness=staleness, rest_s=None)
    if alone is None or base is None or real is None:
        return None
    phases = {"generate_s": generate(alone), "train_s": train(base)}
    best, step = max(phases.values()), mean(real["step_s"])
    compute = max(phases["generate_s"], mean(base["compute_s"]))
    return {**phases, "ideal_s": best, "step_s": step, "reached": best / step, "reached_computing": compute / step}


def judged(found: Sequence[Found], staleness: dict[str, int]) -> list[dict[str, Any]]:
    """By work: the bar, every round's numbers, and whether their median reaches it."""
    result = []
    for work, bound in staleness.items():
        numbers = sorted({r["round"] for r in found})
        rounds = [ideal([r for r in found if r["round"] == n], work, bound) for n in numbers]
        whole = [r for r in rounds if r is not None]
        if whole:
            reached = statistics.median(r["reached"] for r in whole)
            bar = {"work": work, "staleness": bound, "least": LEAST, "reached": reached, "ok": reached >= LEAST}
            result.append({**bar, "rounds": whole})
    return result


def against(found: Sequence[Found], peer: Callable[[Found], bool], own: Callable[[Found], bool]) -> float | None:
    """How many times as fast as a peer: the ratio of mean steps, the median over the rounds that have both."""
    ratios = []
    for number in sorted({r["round"] for r in found}):
        of_round = [r for r in found if r["round"] == number]
        theirs, ours = [r for r in of_round if peer(r)], [r for r in of_round if own(r)]
        if theirs and ours:
            ratios.append(mean(theirs[0]["step_s"]) / mean(ours[0]["step_s"]))
    return statistics.median(ratios) if ratios else None


def unlike(found: Sequence[Found]) -> list[str]:
    """Where runs of one work did not train the same replies: then they cannot be compared."""
    problems = []
    for work in dict.fromkeys(r["work"] for r in found):
        runs = [r for r in found if r["work"] == work and r["framework"] == "relax"]
        lengths = {tuple(m["length/trained"] for m in r["metrics"]) for r in runs}
        if len(lengths) > 1:
            problems.append(f"{work}: the settings trained replies of other lengths: {sorted(lengths)[:2]}")
    return problems


def row(runs: Sequence[Found]) -> dict[str, Any]:
    """What the table shows of one setting: means over its rounds."""
    measured = [m for r in runs for m in r["metrics"][r["warmup"] :]]
    played = [m["length/played"] for m in measured if m["length/played"] is not None]
    last = [m["reward"] for r in runs for m in r["metrics"][-3:]]
    step = mean([mean(r["step_s"]) for r in runs])
    return {
        "setting": label(runs[0]),
        "steps_per_hour": 3600 / step,
        "step_s": step,
        "step_s_min": min(min(r["step_s"]) for r in runs),
        "step_s_max": max(max(r["step_s"]) for r in runs),
        "trainer_wait_s": mean([mean(r["wait_s"]) for r in runs]),
        "engine_idle": 1 - mean([e["busy_share"] for r in runs for e in r["engines"]]),
        "length_played": mean(played) if played else None,
        "length_trained": mean([m["length/trained"] for m in measured]),
        "reward_last": mean(last),
        "lag_tokens": lag_shares(runs),
        "cpu_s_per_step": mean([r["cpu_s_per_step"] for r in runs]),
    }


def lag_shares(runs: Sequence[Found]) -> dict[str, float]:
    """The share of trained tokens by lag, over whole runs."""
    totals: dict[str, int] = {}
    for r in runs:
        for lag, tokens in r["summary"]["lag_tokens"].items():
            totals[lag] = totals.get(lag, 0) + tokens
    whole = sum(totals.values())
    return {lag: tokens / whole for lag, tokens in sorted(totals.items())} if whole else {}
