"""Which releases of SGLang are taken, refused and noted, and what differs among them, without a server."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.errors import EngineError
from relax_core.setup import EngineSetup
from relax_core.testing.tiny import tiny_adapter
from relax_plugin_sglang.config import SglangConfig
from relax_plugin_sglang.engine import SglangEngine
from relax_plugin_sglang.names import Checkpoint
from relax_plugin_sglang.release import OLDEST, TESTED, Release, installed
from relax_plugin_sglang.server import _free_port
from relax_plugin_sglang.weights import FilesSender, IpcSender, Sender

CPU = Path(__file__).resolve().parents[2] / "relax_plugins" / "relax-plugin-sglang" / "cpu"


@pytest.mark.parametrize(
    ("text", "number", "sessions"),
    [
        ("0.5.11", (0, 5, 11), False),
        ("0.5.15.post1", (0, 5, 15), False),
        ("0.5.20", (0, 5, 20), False),
        ("0.5.21", (0, 5, 21), True),
        ("0.6.0rc1", (0, 6, 0), True),
        ("1.0.0.dev3+g12ab", (1, 0, 0), True),
        ("0.0.0.dev1+g12ab", None, True),
        ("", None, True),
    ],
)
def test_a_version_is_read_and_what_is_none_is_taken_for_the_newest(text: str, number: Any, sessions: bool) -> None:
    release = Release.of(text)
    assert (release.number, release.sessions) == (number, sessions)


def test_old_ones_are_refused_and_those_that_nobody_tested_are_noted() -> None:
    for text in ("0.5.10.post1", "0.4.9"):
        with pytest.raises(
            EngineError, match=rf"^engine.python: p has SGLang {text}; the oldest .* is 0\.5\.11: update"
        ):
            Release.of(text).check("engine.python: p")
    for text in ("0.5.11", "0.5.12.post1", "0.5.23", "9.0.0", ""):
        Release.of(text).check("engine.python: p")
    assert [Release.of(text).note() for text in ("0.5.11", "0.5.17", "0.5.23.post1")] == [None] * 3
    newer, unknown = Release.of("0.5.24").note(), Release.of("0.0.0.dev1").note()
    assert newer and "SGLang 0.5.24 is newer than the tested releases (0.5.11 to 0.5.23)" in newer
    assert unknown and "SGLang 0.0.0.dev1 is none of the tested releases" in unknown


def environment(folder: Path, version: str) -> Path:
    """An interpreter that says that it has this SGLang, and has nothing."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *sglang*) echo {version};; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("version", "said", "noted"),
    [
        ("0.5.9", r"engine\.python: .* has SGLang 0\.5\.9; the oldest that can serve is 0\.5\.11: update it", False),
        ("0.5.99", r"the server does not start: its process ended with exit code", True),
    ],
)
def test_an_engine_asks_for_the_release_before_it_starts_a_server(
    tmp_path: Path, version: str, said: str, noted: bool
) -> None:
    notes: list[str] = []
    config = SglangConfig(python=environment(tmp_path, version), device="cpu")
    engine = SglangEngine(config, EngineSetup(tiny_adapter(), 0, False, tmp_path, note=notes.append))
    with pytest.raises(EngineError, match=said):
        asyncio.run(asyncio.wait_for(engine.start(), 60))
    assert ["0.5.99 is newer than the tested" in line for line in notes] == [True] * noted
    assert (tmp_path / "logs").exists() is noted, "a server that cannot serve was started"


def test_what_an_environment_has() -> None:
    assert installed(Path(sys.executable), "torch") == torch.__version__
    assert installed(Path(sys.executable), "no-such-thing") == installed(Path("no-such-python"), "torch") == ""


class Told:
    """A client that says yes, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def post(self, route: str, body: Any) -> Any:
        self.asked.append((route, body))
        return {"success": True}


@pytest.mark.parametrize(
    ("kind", "sessions", "routes"),
    [
        (IpcSender, False, ["/update_weights_from_tensor"] * 2),
        (IpcSender, True, ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"]),
        (FilesSender, True, ["/update_weights_from_disk"]),
    ],
)
def test_weights_go_in_a_session_where_the_release_wants_one(
    kind: type[Sender], sessions: bool, routes: list[str]
) -> None:
    told = Told()
    sender = kind(told, Checkpoint({"a": (2,), "b": (3,)}, False), sessions=sessions)  # type: ignore[arg-type]
    asyncio.run(sender.send([("a", torch.zeros(2)), ("b", torch.ones(3))], "1.2"))
    assert [route for route, _ in told.asked] == routes
    assert all(body == {} for route, body in told.asked if "weight_update" in route)


def test_ports_leave_room_for_those_that_old_releases_count_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = iter([60000, 55536, 55535])

    class Socket:
        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...

        def bind(self, _: Any) -> None: ...

        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", next(handed)

    monkeypatch.setattr("socket.socket", Socket)
    assert _free_port("127.0.0.1") == 55535


def test_each_release_that_can_be_tested_is_pinned_and_listed() -> None:
    """``make test-sglang SGLANG_RELEASE=…`` takes these files; the README's table has a row for each."""
    default = re.search(r"^sglang==(.+)$", (CPU / "requirements.txt").read_text(), re.M)
    assert default
    releases = {default[1]}
    for file in (CPU / "releases").iterdir():
        lines = file.read_text().split()
        assert f"sglang=={file.stem}" in lines and lines == sorted(lines) and all("==" in line for line in lines), file
        releases.add(file.stem)
    numbers = sorted(number for text in releases if (number := Release.of(text).number))
    assert (numbers[0], numbers[-1]) == TESTED and numbers[0] == OLDEST
    table = set(re.findall(r"^\| (0\.5\.\S+) \|", (CPU.parent / "README.md").read_text(), re.M))
    assert table == releases
