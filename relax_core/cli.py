"""The command ``relax``. Importing this module, and ``--help``, load nothing but the command line itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core._version import __version__

if TYPE_CHECKING:
    from relax_core.catalog import Entry
    from relax_core.errors import RelaxError

EXIT_ERROR = 2
"""Something the user can put right; other codes: 0 all went well, 1 a bug, 130 Ctrl-C."""

app = typer.Typer(
    name="relax",
    help="Reinforcement learning for omni-modal language models and agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"relax-rl {__version__}")
        raise typer.Exit()


def _want_traceback(context: typer.Context, wanted: bool) -> None:
    if wanted and isinstance(context.obj, dict):
        context.obj["traceback"] = True


Traceback = Annotated[
    bool, typer.Option("--traceback", help="Show where in the code an error arose.", callback=_want_traceback)
]
RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PATH=VALUE]...", help="Such as max_staleness=2 algorithm.clip_low=0.1 rewards.0.weight=2."
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Plugins = Annotated[
    list[str] | None, typer.Option("--plugin", help="Activate a plugin, too; may be given several times.")
]
RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="RUN.yaml", help="Take the settings of this run file.")
]


@app.callback()
def relax(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Reinforcement learning for omni-modal language models and agents."""


@app.command()
def train(run_file: RunFile, overrides: Overrides = None, traceback: Traceback = False) -> None:
    """Check, then train; a run that was interrupted goes on from its newest checkpoint."""
    from relax_core.train import main as run

    raise typer.Exit(run(run_file, overrides or []))


@app.command(name="eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, or a run file.", show_default=False)],
    overrides: Overrides = None,
    traceback: Traceback = False,
) -> None:
    """Play the evaluations of a run on its newest checkpoint."""
    from relax_core.evaluate import main as run_evaluation

    raise typer.Exit(run_evaluation(run, overrides or []))


@app.command()
def check(
    run_file: RunFile,
    overrides: Overrides = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also try tokenizer and adapter on tasks, and probe the engine.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Look for mistakes in a run file, its plugins and its data, and print the plan. Nothing is written."""
    from relax_core.check import main as run_check

    raise typer.Exit(run_check(run_file, overrides or [], deep=deep))


@app.command()
def plugins(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show one component with its settings.")] = None,
    traceback: Traceback = False,
) -> None:
    """List every installed component, with the plugin and the distribution that provide it."""
    from relax_core.catalog import catalog, find

    entries = catalog()
    if id is None:
        _print_catalog(entries)
        return
    for entry in find(id, entries):
        _print_component(entry)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.", show_default=False)],
    step: Annotated[int, typer.Option("--step", min=0, help="Which step, counted from 0.", show_default=False)],
    traceback: Traceback = False,
) -> None:
    """Compute rewards, advantages, loss and gradient norm of a past step again, from the journal."""
    from relax_core.replay import main as run_replay

    raise typer.Exit(run_replay(run, step))


@app.command()
def grade(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="Rows of grader, gold, response, reward.", show_default=False)
    ],
    json: Json = False,
    plugin: Plugins = None,
    run: RunOption = None,
    traceback: Traceback = False,
) -> None:
    """Try rewards on recorded replies, and compare with what they should have given."""
    from relax_core.grade import main as run_grade

    raise typer.Exit(run_grade(file, as_json=json, plugins=plugin or [], run=run))


@app.command()
def decode(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Images, sounds and videos.", show_default=False)
    ],
    json: Json = False,
    kind: Annotated[
        str | None, typer.Option("--kind", help="image, audio or video; default: what it turns out to be.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Whose tokens to count.", show_default=False)] = None,
    plugin: Plugins = None,
    run: RunOption = None,
    traceback: Traceback = False,
) -> None:
    """Show what the decoders make of media files, and how many tokens they are."""
    from relax_core.decode import main as run_decode

    raise typer.Exit(run_decode(files, as_json=json, kind=kind, model=model, plugins=plugin or [], run=run))


@app.command()
def play(
    run_file: RunFile,
    overrides: Overrides = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="scripted, human or model; default: scripted if there are replies.")
    ] = None,
    reply: Annotated[list[str] | None, typer.Option("--reply", help="What is replied, in turn; repeated.")] = None,
    replies: Annotated[
        Path | None, typer.Option("--replies", help="A file with a reply for each line.", show_default=False)
    ] = None,
    task: Annotated[str, typer.Option("--task", help="Its place in the split, or its id.")] = "0",
    environment: Annotated[
        str | None, typer.Option("--environment", help="Its name; default: the run file's first.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option("--split", help="train or eval.")] = "train",
    plays: Annotated[int, typer.Option("--plays", min=1, help="Plays of the task.")] = 1,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where it is saved; default: <runs>/<name>-plays/<n>.", show_default=False),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Play a task of an environment: you reply, a script does, or the policy of the newest checkpoint."""
    from relax_core.play.command import Wish
    from relax_core.play.command import main as run_play

    wish = Wish(policy, tuple(reply or ()), replies, task, environment, split, plays, folder)
    raise typer.Exit(run_play(run_file, overrides or [], wish))


@app.command(name="new-plugin")
def new_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As run files will call it, such as zoom-in.", show_default=False)
    ],
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="environment, reward, algorithm, modality, engine or callback; may be repeated."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where to write it; default: ./relax-plugin-NAME.", show_default=False),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Write a plugin of your own: a working, tested distribution to begin with."""
    from relax_core.new_plugin.render import main as render

    raise typer.Exit(render(name, kind or [], folder))


@app.command()
def schema(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.yaml]", help="Whose plugins; default: all installed ones.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it there.", show_default=False)] = None,
    traceback: Traceback = False,
) -> None:
    """Print the JSON Schema of run files, for editors."""
    import json

    from relax_core.config import yaml
    from relax_core.config.json_schema import run_schema
    from relax_core.errors import ConfigError
    from relax_core.plugins import BUILT_IN, activate, installed_plugins

    if run_file is None:
        names = sorted({entry.name for entry in installed_plugins()} - set(BUILT_IN))
    else:
        names = yaml.read(run_file).get("plugins") or []
    text = json.dumps(run_schema(activate(names)), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from error
        print(f"written to {output}; name it in a run file's first line: # yaml-language-server: $schema={output}")


# --- tables -----------------------------------------------------------------------------------------------------------


def _print_catalog(entries: list[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True, style="bold")
    table.add_column("kind", no_wrap=True)
    table.add_column("summary", overflow="fold")
    table.add_column("plugin", no_wrap=True)
    table.add_column("distribution", no_wrap=True)
    for entry in entries:
        summary = entry.component.summary if entry.component else ""
        table.add_row(entry.id, entry.kind, entry.error or summary, entry.plugin, entry.distribution)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    console.print(table)


def _print_component(entry: Entry) -> None:
    from rich.console import Console
    from rich.table import Table

    from relax_core.catalog import settings

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    assert entry.component is not None
    console.print(f"{entry.id} ({entry.kind}, plugin {entry.plugin}, {entry.distribution})", style="bold")
    console.print(f"{entry.component.summary}\n{entry.component.target}".strip())
    rows = settings(entry)
    if not rows:
        console.print("no settings")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "type", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, row.type, row.default, row.doc)
    console.print(table)


# --- errors -----------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """The entry point: errors that a user can put right are one line each on stderr, without a traceback."""
    from relax_core.errors import RelaxError

    settings: dict[str, Any] = {"traceback": False}
    try:
        app(args=arguments, obj=settings)
    except RelaxError as error:
        if settings["traceback"]:
            import traceback

            traceback.print_exception(error)
        else:
            _print_error(error)
        sys.exit(EXIT_ERROR)


def _print_error(error: RelaxError) -> None:
    from relax_core.errors import ConfigError

    lines = error.problems if isinstance(error, ConfigError) else (str(error),)
    for line in lines:
        print(f"error: {' '.join(line.split())}", file=sys.stderr)


if __name__ == "__main__":
    main()
