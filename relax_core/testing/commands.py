"""Commands as an author types them in a plugin's folder, in forks of this process: what is heavy is imported once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_S = 90
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

    ``pip install -e .`` installs there instead: this environment stays as it is.
    """
    from relax_core import cli

    if words[0] == "relax":
        return forked(lambda: cli.main(list(words[1:])), project, site, limit_s)
    if list(words[:3]) == ["python", "-m", "pytest"]:
        return forked(lambda: _pytest(words[3:]), project, site, limit_s)
    if list(words) == ["pip", "install", "-e", "."]:
        words = [sys.executable, "-m", "pip", "install", *INSTALL, "--target", str(site), "."]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=limit_s)
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
    assert in_child(work, limit_s=limit_s) == 0, said.read_text()
    return int(ended.read_text()), said.read_text()
