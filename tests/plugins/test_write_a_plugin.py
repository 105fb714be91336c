"""docs/write-a-plugin.md, block by block: files are written, commands run in child processes, outputs compared."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from relax_core.hook_manager import hook_problems
from relax_core.hookspecs import Callback
from relax_core.new_plugin.render import chosen_kinds, names_of, render
from relax_core.testing.commands import import_heavy, run_command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "write-a-plugin.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def file_of(language: str, text: str) -> str | None:
    """The path of a block that is a file: its first line names it."""
    if language in ("console", "text"):
        return None
    first = re.match(r"# (\S+)\n", text)
    assert first, f"a block without the name of its file: {text[:80]}"
    return first[1]


def commands(text: str) -> list[tuple[list[str], str]]:
    """Each command of a console block, as words, with the output that the page shows."""
    found = []
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


@pytest.mark.timeout(600)
def test_the_page_from_nothing_to_a_trained_run(tmp_path: Path) -> None:
    """Block by block: a file is written when the page comes to it, a command run with what is there by then."""
    folder, site = tmp_path, tmp_path / "site"
    import_heavy()
    for language, text in BLOCKS:
        if name := file_of(language, text):
            (folder / name).write_text(text, encoding="utf-8")
        for words, output in commands(text) if language == "console" else ():
            if words[0] == "cd":
                folder = folder / words[1]
                continue
            code, said = run_command(words, folder, site)
            call = f"$ {shlex.join(words)}\n{said}"
            assert code == (2 if output.startswith("error: ") else 0), call
            assert pattern(output).fullmatch(said), f"{call}\nThe page shows:\n{output}"


def test_the_page_shows_what_is_rendered() -> None:
    rendered = render(names_of("odd"), chosen_kinds(["environment", "reward"]))
    shown = next(text for language, text in BLOCKS if file_of(language, text) == "pyproject.toml")
    assert shown == "# pyproject.toml\n" + rendered["pyproject.toml"]


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
    written = {file for language, text in BLOCKS if (file := file_of(language, text))}
    rendered = render(names_of("odd"), chosen_kinds(["environment", "reward"]))
    assert sorted(shown) == sorted(written | set(rendered))


REFUSED = re.findall(r"^\| `((?:async )?def .*?)` \| (.*) \|$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("code", "said"), REFUSED)
def test_a_refused_hook(code: str, said: str) -> None:
    known: dict[str, type] = {"Callback": Callback}
    exec(f"class Mine(Callback):\n    {code}", known)
    assert list(hook_problems(known["Mine"])) == [said]


def test_there_are_refused_hooks() -> None:
    assert len(REFUSED) == 6
