"""Agents that are programs: what they are given, what becomes of their result, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from relax_core.chat import Chat, PlayOver, Seat
from relax_core.config.schema import PlayLimits
from relax_core.errors import ConfigError
from relax_core.media import MediaStore
from relax_core.models.config import TextConfig
from relax_core.models.text import TextAdapter
from relax_core.run import build_modalities
from relax_core.testing.dialogues import CHATML, model_folder
from relax_core.testing.talking import Talker, sampled
from relax_core.types import (
    Audio,
    Decoded,
    Image,
    Message,
    Sampling,
    Stop,
    Task,
    ToolCall,
    ToolSpec,
    Video,
    message,
    user,
)
from relax_envs.agent import program
from relax_envs.agent.command import Agent
from relax_envs.agent.content import messages_of
from relax_envs.agent.errors import AgentDeadline, AgentExit, AgentResult, AgentSilent
from relax_envs.agent.task_file import read_result, write_task

pytestmark = pytest.mark.timeout(180)

ASK = """
import json, os, sys, time, subprocess, urllib.request
task = json.load(open(os.environ["RELAX_TASK"]))
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
def result(**found):
    json.dump(found, open(os.environ["RELAX_RESULT"], "w"))
"""


class Bench:
    """Plays a program as an agent."""

    def __init__(self, folder: Path) -> None:
        (folder / "data.jsonl").write_text(json.dumps({"prompt": "what", "answer": "secret"}) + "\n")
        model = folder / "model"
        model.mkdir()
        template = folder / "used.jinja"
        template.write_text(CHATML)
        self.folder = folder
        self.adapter = TextAdapter(TextConfig(path=model_folder(model), chat_template=template), MediaStore({}, 0))
        self.talker = Talker(self.adapter, lambda prompt: "hello")

    def environment(self, code: str, **settings: Any) -> Agent:
        script = self.folder / "agent.py"
        script.write_text(ASK + textwrap.dedent(code))
        settings = dict[str, Any](command=("{python}", str(script)), deadline=120.0) | settings
        return Agent(Agent.Config(data=self.folder / "data.jsonl", **settings))

    def play(self, code: str, limits: PlayLimits | None = None, **settings: Any) -> Chat:
        environment = self.environment(code, **settings)
        self.talker.gave.clear()
        self.chat = Chat(self.talker, self.adapter, Sampling(), Seat(0, "t", 0, 0, ()), None, limits)

        async def play() -> None:
            try:
                await environment.play(environment.tasks("train")[0], self.chat)
            finally:
                await environment.close()

        asyncio.run(asyncio.wait_for(play(), 150))
        return self.chat


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


# --- what an agent is given, and gives -------------------------------------------------------------------------------


def test_a_program_plays(bench: Bench) -> None:
    chat = bench.play("""
        assert task["messages"] == [{"role": "user", "content": "what"}] and "secret" not in str(task)
        said = ask(task["messages"])
        ask([*task["messages"], said, {"role": "user", "content": "and"}])
        result(answer="seven", metrics={"steps": 2})
    """)
    assert chat.answer == "seven" and chat.metrics == {"steps": 2.0} and len(chat.turns) == 2
    (sample,) = chat.samples
    assert sampled([sample]) == bench.talker.given()


def test_its_environment_is_what_was_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("LANG", "C.UTF-8")
    bench.play(
        """
        assert "SECRET_TOKEN" not in os.environ and os.environ["MINE"] == "1" and os.environ["LANG"] == "C.UTF-8"
        assert os.environ["NO_PROXY"] == "127.0.0.1"
        assert sys.argv[1:] == ["a b", os.environ["OPENAI_API_KEY"], '{"x": 1}'], sys.argv
        assert os.path.realpath(os.getcwd()) == os.path.realpath(os.path.dirname(os.environ["RELAX_TASK"]))
        ask(task["messages"])
        """,
        env={"MINE": "1"},
        command=("{python}", str(bench.folder / "agent.py"), "a b", "{key}", '{"x": 1}'),
    )


def test_it_runs_where_it_is_told_to(bench: Bench) -> None:
    bench.play("assert os.path.exists('data.jsonl'); ask(task['messages'])", cwd=bench.folder)


def test_the_folder_of_a_play_is_removed(bench: Bench) -> None:
    bench.play("open('left.txt', 'w').write('x'); ask(task['messages']); result(answer=os.getcwd())")
    assert bench.chat.answer is not None and not Path(bench.chat.answer).exists()


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_another_exit_code_is_an_error_with_the_end_of_what_it_said(bench: Bench) -> None:
    with pytest.raises(AgentExit) as caught:
        bench.play("ask(task['messages']); sys.stderr.write('x' * 9000 + ' no luck é'); sys.exit(3)", output_limit=20)
    assert str(caught.value) == "the agent ended with exit code 3; standard error ends with:\nxxxxxxxxxx no luck é"


def test_a_program_that_is_not_there(bench: Bench) -> None:
    with pytest.raises(AgentExit, match=r"could not be started(?s:.)*No such file"):
        bench.play("", command=("./nothing",))


def test_a_program_that_asks_nothing(bench: Bench) -> None:
    with pytest.raises(AgentSilent, match="OPENAI_BASE_URL"):
        bench.play("pass")


def test_a_flood_of_output_is_no_matter(bench: Bench) -> None:
    bench.play("""
        ask(task["messages"])
        for stream in (sys.stdout, sys.stderr):
            for _ in range(300):
                stream.write("x" * 10000)
    """)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object"),
        ('{"score": 1}', "nothing else"),
        ('{"answer": 7}', "no text"),
        ('{"metrics": {"a": "b"}}', "numbers"),
        ('{"metrics": {"a": NaN}}', "finite"),
        ('{"metrics": {"a": 1' + "0" * 400 + "}}", "finite"),
        ('{"answer": "' + "x" * (1 << 20) + '"}', "write less"),
    ],
)
def test_a_result_that_cannot_be_read(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    with pytest.raises(AgentResult, match=words):
        read_result(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(AgentResult):
        read_result(path)


def test_settings_that_cannot_work_are_found_before_the_run(tmp_path: Path) -> None:
    from relax_core.config.resolve import load
    from relax_core.testing.runs import run_file

    (tmp_path / "data.jsonl").write_text('{"prompt": "cat", "answer": "dog"}\n')
    section = {"id": "agent", "data": str(tmp_path / "data.jsonl"), "command": ["no-such-program"], "cwd": "/nowhere"}
    path = run_file(tmp_path, environments=[section], evaluation=[])
    with pytest.raises(ConfigError) as caught:
        load(path, [])
    assert "no program 'no-such-program'" in str(caught.value) and "/nowhere is no folder" in str(caught.value)


# --- the end of a program --------------------------------------------------------------------------------------------

FAMILY = """
    nap = ["sh", "-c", 'touch "$1"; sleep 100; true', MARK]
    subprocess.Popen([*nap, "child"])
    subprocess.Popen([*nap, "own-group"], start_new_session=True)
    subprocess.Popen(["sh", "-c", '"$@" &', "orphan", *nap, "orphan"], start_new_session=True)
    while not all(os.path.exists(name) for name in ("child", "own-group", "orphan")):
        time.sleep(0.01)
"""


def left(mark: str) -> list[psutil.Process]:
    """Processes that still run with this argument."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def wait_for_family(mark: str) -> str:
    """An agent's code that goes on when all of its family run."""
    return textwrap.dedent(FAMILY).replace("MARK", repr(mark))


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux finds those that left their group")


@needs_proc
def test_the_end_of_a_program_ends_all_that_it_started(bench: Bench) -> None:
    mark = f"family-{os.getpid()}-a"
    bench.play(wait_for_family(mark) + "\nask(task['messages'])\n")
    assert left(mark) == []


@needs_proc
def test_the_deadline_ends_all(bench: Bench) -> None:
    mark = f"family-{os.getpid()}-b"
    started = bench.folder / "started"
    code = f"\nopen({str(started)!r}, 'w').close(); ask(task['messages']); print('nap', file=sys.stderr)"
    begin = time.monotonic()
    with pytest.raises(AgentDeadline, match=r"still running after 6 s; standard error ends with:\nnap"):
        bench.play(wait_for_family(mark) + code + "\ntime.sleep(100)", deadline=6.0)
    assert started.exists() and left(mark) == [] and time.monotonic() - begin < 60


@needs_proc
def test_a_play_that_is_cancelled_ends_all(bench: Bench) -> None:
    mark = f"family-{os.getpid()}-c"
    environment = bench.environment(wait_for_family(mark) + "\nask(task['messages'])\ntime.sleep(100)")
    chat = Chat(bench.talker, bench.adapter, Sampling(), Seat(0, "t", 0, 0, ()))

    async def play() -> None:
        playing = asyncio.create_task(environment.play(environment.tasks("train")[0], chat))
        while not chat.turns:
            await asyncio.sleep(0.01)
        assert len(left(mark)) == 3
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert left(mark) == []
        await environment.close()

    asyncio.run(asyncio.wait_for(play(), 150))


@needs_proc
def test_a_program_that_kills_its_group_gets_nobody_out(bench: Bench) -> None:
    mark = f"family-{os.getpid()}-d"
    with pytest.raises(AgentExit, match="exit code 137"):
        bench.play(wait_for_family(mark) + "\nask(task['messages'])\nos.kill(0, 9)")
    assert left(mark) == []


def test_a_limit_ends_the_program_and_the_play(bench: Bench) -> None:
    """It hears of it, and may still write its result, but not for long."""
    with pytest.raises(PlayOver) as caught:
        bench.play(
            """
            import urllib.error
            try:
                for _ in range(3):
                    ask(task["messages"])
            except urllib.error.HTTPError as error:
                assert error.code == 429 and b"limits.turns" in error.read()
            time.sleep(100)
            """,
            PlayLimits(turns=2),
        )
    assert caught.value.stop is Stop.TURNS and len(bench.chat.turns) == 2


def test_the_guard_dies_with_this_process(tmp_path: Path) -> None:
    """Were it killed, its agents would end too: the end of a pipe tells the guard."""
    code = f"""
import asyncio, pathlib, os
from relax_envs.agent import program
async def main():
    asyncio.create_task(program.run({[sys.executable, "-c", "import time; time.sleep(100)", str(tmp_path)]!r},
        cwd=pathlib.Path("."), env=dict(os.environ), deadline_s=90, most_said=9))
    await asyncio.sleep(100)
asyncio.run(main())
"""

    async def main() -> None:
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        while not left(str(tmp_path)):
            await asyncio.sleep(0.02)
        parent.kill()
        await parent.wait()
        end = time.monotonic() + 20
        while left(str(tmp_path)) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert left(str(tmp_path)) == []

    asyncio.run(asyncio.wait_for(main(), 150))


def test_a_command_by_itself(tmp_path: Path) -> None:
    async def run(*command: str, deadline_s: float = 100) -> program.Ended:
        return await program.run(command, cwd=tmp_path, env=os.environ, deadline_s=deadline_s, most_said=100)

    python = sys.executable
    assert asyncio.run(run(python, "-c", "import sys; sys.stderr.write('hm')")) == program.Ended(0, "hm")
    assert asyncio.run(run(python, "-c", "import os; os.kill(os.getpid(), 15)")).code == 143
    assert asyncio.run(run(python, "-c", "import time; time.sleep(99)", deadline_s=0.5)).code is None
    assert asyncio.run(run("/nowhere/nothing")).code == 127


# --- tasks as files --------------------------------------------------------------------------------------------------


def test_a_task_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    """Media too, bit for bit: decoded content is written losslessly."""
    from relax_core.plugins import activate

    media = MediaStore(build_modalities(activate(())), 1 << 24)
    rng = np.random.default_rng(0)
    parts = (
        Image(Decoded("image", rng.integers(0, 256, (8, 9, 3)).astype(np.uint8))),
        Audio(Decoded("audio", rng.uniform(-1, 1, 1600).astype(np.float32), 16000.0)),
        Video(Decoded("video", rng.integers(0, 256, (3, 8, 8, 3)).astype(np.uint8), 2.0, times=(0.0, 0.5, 1.0))),
    )
    spec = ToolSpec("add", "Adds.", {"type": "object"})
    messages = (
        Message("system", (spec,)),
        message("user", "北京", *parts),
        message("assistant", ToolCall("add", {"a": "é"}, "c1")),
    )
    task = Task("t-1", messages, answer="secret", metadata={"level": 3, "path": Path("x")})
    content = json.loads(write_task(task, tmp_path, media.dump).read_text())
    assert content["id"] == "t-1" and content["metadata"] == {"level": 3, "path": {"$path": "x"}}
    assert content["tools"][0]["function"]["name"] == "add" and "secret" not in json.dumps(content)
    assert [m["kind"] for m in content["media"]] == ["image", "audio", "video"]
    asked, said = messages_of([*content["messages"], {"role": "user", "content": "go on"}])[:2]
    assert said == messages[2]
    assert [media.decode(part).hash for part in asked.media()] == [media.decode(part).hash for part in parts]
    for part, file in zip(asked.media(), content["media"], strict=True):
        assert Path(file["path"]).read_bytes() == part.source


def test_media_from_files_keep_their_bytes(tmp_path: Path) -> None:
    source = tmp_path / "sound.mp3"
    source.write_bytes(b"ID3 and more")
    store = MediaStore({}, 0)
    assert store.dump(Audio(source)) == (".mp3", b"ID3 and more")
    assert store.dump(Audio(b"RIFF0000WAVE")) == (".wav", b"RIFF0000WAVE")
    content = json.loads(write_task(Task("t", (user(Audio(source)),)), tmp_path, store.dump).read_text())
    assert content["messages"][0]["content"][0]["input_audio"]["format"] == "mp3"
