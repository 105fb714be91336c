"""Commands as an author types them in a plugin's folder, in forks of this process: what is heavy is imported once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_S = 180
"""Of one command."""
INSTALL = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]


def import_heavy() -> None:
    """What commands need is imported here, before they run in forks."""
    import transformers

    import relax_core.models.text
    import relax_core.torch.engine
    import relax_core.torch.trainer  # noqa: F401

    for name in ("Qwen3ForCausalLM", "PreTrainedTokenizerFast"):
        getattr(transformers, name)


def run_command(words: Sequence[str], project: Path, site: Path, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Exit code and output of a command, called in the project's folder with what is installed in ``site``.

    ``pip install -e .`` puts the metadata there, and this environment stays as it is; the package itself is taken from
    the project's folder, as from any editable install.
    """
    from relax_core import cli

    if words[0] == "relax":
        return forked(lambda: cli.main(list(words[1:])), project, site, limit_s)
    if list(words[:3]) == ["python", "-m", "pytest"]:
        return forked(lambda: _pytest(words[3:]), project, site, limit_s)
    if list(words) == ["pip", "install", "-e", "."]:
        return _install(project, site, limit_s)
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=limit_s)
    return done.returncode, done.stdout + done.stderr


def _install(project: Path, site: Path, limit_s: float) -> tuple[int, str]:
    words = [sys.executable, "-m", "pip", "install", *INSTALL, "--target", str(site), "--upgrade", "."]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=limit_s)
    for path in site.iterdir() if site.is_dir() else ():
        if path.is_dir() and path.suffix != ".dist-info":
            shutil.rmtree(path)
    return done.returncode, done.stdout + done.stderr


def _pytest(arguments: Sequence[str]) -> None:
    import pytest

    sys.exit(pytest.main([*arguments, "-p", "no:cacheprovider"]))


def forked(call: Callable[[], object], project: Path, site: Path, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Make a call that ends by SystemExit in a fork, whose output goes to a file."""
    from relax_core.plugins import installed_plugins
    from relax_core.testing.runs import in_child

    said, ended = project.parent / "said", project.parent / "ended"

    def work() -> None:
        import torch

        torch.set_num_threads(1)  # threads do not survive a fork
        os.chdir(project)
        os.environ["COLUMNS"] = "160"
        sys.path[:0] = [str(project), str(site)]
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
    assert in_child(work, limit_s=limit_s) == 0, said.read_text()
    return int(ended.read_text()), said.read_text()
