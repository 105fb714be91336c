"""The page docs/algorithms.md: every algorithm's formula, paper, use and settings, from the classes themselves.

python -m relax_algorithms.document algorithms-extra > docs/algorithms.md    # the built-in suite and the plugins named
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence

from relax_algorithms.options import Options
from relax_core.config.document import rows, table
from relax_core.interfaces import Algorithm
from relax_core.plugins import Stack, activate

HEAD = """\
# Algorithms

Generated from the classes; do not edit. To write it again: `{command}`

An algorithm turns the rewards of a task's plays into an advantage A for each sampled token, and these into a loss,
which is minimised. It owns no loop and knows no trainer: the run file chooses one,
`algorithm: {{id: grpo, clip_high: 0.28}}`.

## Words

`pi` is the policy being trained, `pi_old` the policy at the start of the step, `mu` the policy that the engine sampled
from, `ref` the reference, all of them tempered and without banned tokens; `r = pi / pi_old`, `rho = pi_old / mu`, `sg`
stops the gradient. R is a play's reward, mean and std are those of its group (the plays of one task); a *sequence* is a
whole trajectory, over all of its samples. A token loss counts only where the policy sampled the token.

- The standard deviation is the sample one, in float64; a group whose valid rewards are all equal gets exactly 0, and so
  does a single valid play (before whitening, where that is asked for). A play on which every reward abstains is left
  out of all statistics and is not trained.
- With `updates_per_step: 1` and `old: recompute`, pi is pi_old and r is 1: nothing is clipped. From the second update
  of a step on it moves. `old: engine` takes mu as pi_old.
- Counts in denominators are those of the whole optimizer update: how it is cut into micro-batches, padded, packed or
  spread over ranks does not change the gradient. Whitening is over the whole step.
- Log-ratios are clamped to +-20 before every exp.

## What goes with them

- `updates_per_step`, `epochs` and `old` of the run file: how often a step's batch is trained, and where pi_old is from.
- The stages `reference` (for `kl`), `critic` (for `ppo`) and `teacher` (for `opd`) start by themselves where an
  algorithm needs them; their settings are in the run file's `stages`.
- The callbacks `dynamic-sampling`, `overlong` and `mask-truncated`; see [hooks.md](hooks.md).
- `relax check` explains in one line what cannot go together, and notes what probably should not.

`relax_core.testing.algorithm_batch` runs one algorithm on a batch given as JSON, to compare it with any other code: see
[cross-check.md](cross-check.md).
"""

AGGREGATIONS = """\
## How token losses become one number

| `aggregation` | is | from |
|---|---|---|
| `token-mean` | the mean over all tokens of the update | DAPO |
| `sequence-mean` | the mean over sequences of their token mean | the original GRPO |
| `sequence-sum` | the mean over sequences of their sum | |
| `constant` | that, divided by the number `constant` | Dr. GRPO |
| `prompt-mean` | the mean over tasks of the token mean inside the task | |
"""


def page(plugins: Sequence[str]) -> str:
    """The whole page. Raises PluginError for a plugin that is not installed."""
    stack = activate(plugins)
    command = " ".join(["python -m relax_algorithms.document", *plugins, "> docs/algorithms.md"])
    classes: dict[str, type[Algorithm]] = {id: stack.load("algorithms", id) for id in stack.components("algorithms")}
    parts = [HEAD.format(command=command), "## Which one\n", overview(classes)]
    schema = Options.model_json_schema()
    parts += ["## Options of every policy gradient\n", table(rows(schema, schema)), AGGREGATIONS]
    parts += ["".join(_section(stack, id, cls)) for id, cls in classes.items()]
    return "\n".join(parts)


def overview(classes: dict[str, type[Algorithm]]) -> str:
    lines = ["| id | advantage; loss of a token | paper | when |", "|---|---|---|---|"]
    for id, cls in classes.items():
        about = cls.about
        cells = (f"`{about.formula}`", papers(about.papers), about.use) if about else ("", "", _first_line(cls))
        lines.append(" | ".join([f"| [`{id}`](#{_anchor(id)})", *(cell.replace("|", "\\|") for cell in cells)]) + " |")
    return "\n".join(lines) + "\n"


def papers(ids: Sequence[str]) -> str:
    return ", ".join(f"[{id}](https://arxiv.org/abs/{id})" for id in ids)


def _section(stack: Stack, id: str, cls: type[Algorithm]) -> Iterator[str]:
    provided = stack.provided("algorithms", id)
    built_in = stack.versions[provided.plugin].startswith("relax-rl ")
    yield f"## `{id}`\n\n"
    if not built_in:
        yield f"Plugin `{provided.plugin}`.\n\n"
    yield inspect.cleandoc(cls.__doc__ or "").replace("``", "`") + "\n\n"
    if cls.about is not None:
        yield f"{cls.about.use}\n\nDefaults: {cls.about.defaults}\n\n"
    model = stack.config_class("algorithms", id)
    options = Options.model_json_schema()
    shared = {row.name: row for row in rows(options, options)}
    refused = getattr(model, "refuses", {})
    schema = model.model_json_schema()
    own = [row for row in rows(schema, schema) if shared.get(row.name) != row and row.name not in refused]
    if own:
        yield table(own) + "\n"
    if issubclass(model, Options):
        yield "And the options of every policy gradient"
        yield f", but for {_refusals(refused)}.\n" if refused else ".\n"


def _refusals(refused: dict[str, str]) -> str:
    return "; ".join(f"`{name}` ({why.rstrip('.')})" for name, why in refused.items())


def _first_line(cls: type[Algorithm]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").split("\n", 1)[0]


def _anchor(id: str) -> str:
    """Of the section's heading, as GitHub makes it."""
    return "".join(c for c in id.lower() if c.isalnum() or c in "-_ ").replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page(sys.argv[1:]))
