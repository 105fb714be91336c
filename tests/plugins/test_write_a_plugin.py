"""docs/write-a-plugin.md, block by block: files are written, commands run in child processes, outputs compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core import cli
from relax_core.hook_manager import hook_problems
from relax_core.hookspecs import Callback
from relax_core.plugins import installed_plugins
from relax_core.testing.runs import in_child

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
LIMIT_S = 90
"""Of one command."""


def files() -> dict[str, str]:
    """Path -> content of every block that is a file: its first line names it."""
    named = {}
    for language, text in BLOCKS:
        if language not in ("console", "text"):
            first = re.match(r"# (\S+)\n", text)
            assert first, f"a block without the name of its file: {text[:80]}"
            named[first[1]] = text
    return named


def commands() -> list[tuple[list[str], str]]:
    """Each command of the console blocks, as words, with the output that the page shows."""
    found = []
    for language, text in BLOCKS:
        if language == "console":
            for call in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, output = call.partition("\n")
                found.append((shlex.split(line), output))
    return found


def pattern(output: str) -> re.Pattern[str]:
    """A line ``...`` stands for any lines, ``...`` in a line for any text."""
    lines = [
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + " *\n"
        for line in output.splitlines()
    ]
    return re.compile("".join(lines))


@pytest.mark.timeout(300)
def test_the_page_from_nothing_to_a_trained_run(tmp_path: Path) -> None:
    project, site = tmp_path / "relax-plugin-odd", tmp_path / "site"
    for name, text in files().items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    import_heavy()
    for words, output in commands():
        code, said = run(words, project, site)
        call = f"$ {shlex.join(words)}\n{said}"
        assert code == (2 if output.startswith("error: ") else 0), call
        assert pattern(output).fullmatch(said), f"{call}\nThe page shows:\n{output}"


def import_heavy() -> None:
    """What commands need is imported once, here: they run in forks of this process."""
    import transformers

    import relax_core.models.text
    import relax_core.torch.engine
    import relax_core.torch.trainer  # noqa: F401

    for name in ("Qwen3ForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)


def run(words: list[str], project: Path, site: Path) -> tuple[int, str]:
    """Exit code and output of a command, called in the project's folder with what is installed in ``site``.

    ``pip install -e .`` installs there instead: this environment stays as it is.
    """
    if words[0] == "relax":
        return forked(lambda: cli.main(words[1:]), project, site)
    if words[:3] == ["python", "-m", "pytest"]:
        return forked(lambda: sys.exit(pytest.main([*words[3:], "-p", "no:cacheprovider"])), project, site)
    if words == ["pip", "install", "-e", "."]:
        options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
        words = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), "."]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def forked(call: Callable[[], object], project: Path, site: Path) -> tuple[int, str]:
    """Make a call that ends by SystemExit in a fork, whose output goes to a file."""
    said, ended = project.parent / "said", project.parent / "ended"

    def work() -> None:
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
        os.chdir(project)
        os.environ["COLUMNS"] = "160"
        sys.path.insert(0, str(site))
        installed_plugins.cache_clear()
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        try:
            call()
        except SystemExit as stop:
            sys.stdout.flush()
            ended.write_text(str(int(stop.code or 0)))

    ended.unlink(missing_ok=True)
    assert in_child(work, limit_s=LIMIT_S) == 0, said.read_text()
    return int(ended.read_text()), said.read_text()


def test_the_tree_shows_every_file() -> None:
    tree = next(text for language, text in BLOCKS if language == "text")
    shown: list[str] = []
    folder = ""
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            shown.append((folder if line.startswith("    ") else "") + name)
    assert sorted(shown) == sorted(files())


REFUSED = re.findall(r"^\| `((?:async )?def .*?)` \| (.*) \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("code", "said"), REFUSED)
def test_a_refused_hook(code: str, said: str) -> None:
    known: dict[str, type] = {"Callback": Callback}
    exec(f"class Mine(Callback):\n    {code}", known)
    assert list(hook_problems(known["Mine"])) == [said]


def test_there_are_refused_hooks() -> None:
    assert len(REFUSED) == 6
