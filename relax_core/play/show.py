"""What a play looks like in a terminal: who says what, media as files to open, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relax_core.errors import DataError
from relax_core.types import MEDIA_KINDS, CallError, Message, Text, ToolCall, ToolResult, ToolSpec

if TYPE_CHECKING:
    from rich.console import Console

    from relax_core.chat import Reply
    from relax_core.trajectories import TrajectoryFiles
    from relax_core.types import Decoded, MediaPart, Task, Trajectory

LONGEST = 4000
"""Characters of one text; what is longer is cut in its middle. The files have all of it."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class Show:
    """Listens to a play. Media are written as they are said, so that they can be opened."""

    def __init__(self, console: Console, files: TrajectoryFiles, decode: Any) -> None:
        self.console, self.files, self.decode = console, files, decode

    def note(self, text: str) -> None:
        self._print(text, "dim")

    def prompt(self, text: str) -> None:
        """Without an end of line: something is to be typed behind it."""
        self.console.print(text, style="bold", markup=False, highlight=False, end="")

    # --- a play -------------------------------------------------------------------------------------------------------

    def begins(self, task: Task, member: int) -> None:
        self.console.rule(f"{_safe(task.id)} ({task.environment}), play {member}", align="left")

    def said(self, messages: Sequence[object]) -> None:
        for m in messages:
            if isinstance(m, Message):
                self._turn(m.role, m.parts)
            else:
                self._print(f"no message: {m!r:.200}", "red")

    def replied(self, reply: Reply) -> None:
        self._head("assistant", f" ({_count(reply.tokens, 'token')}, {reply.stop})")
        self._text(reply.text)
        for call in reply.calls:
            if isinstance(call, CallError):
                self._print(f"  [no call: {call.text}]", "yellow")
            else:
                self._print(f"  [calls {_called(call)}]", "yellow")

    def branched(self, turns: int) -> None:
        self.note(f"-- another conversation, behind reply {turns} --")

    def ended(self, trajectory: Trajectory) -> None:
        """Stop reason, error, tokens and rewards."""
        self.console.rule(f"play {trajectory.member}", align="left")
        samples = trajectory.samples
        sampled, total = sum(s.sampled for s in samples), sum(len(s.ids) for s in samples)
        rewrites = int(trajectory.metrics.get("rewrites", 0))
        self._print(
            f"end: {trajectory.stop}; {_count(len(trajectory.turns), 'turn')}; {_count(sampled, 'token')} sampled, "
            f"{total - sampled} observed, in {_count(len(samples), 'sample')} ({_count(rewrites, 'rewrite')})",
            "bold",
        )
        if trajectory.error is not None:
            error = trajectory.error
            self._print(f"error: {error.where}: {error.type}: {error.text}", "bold red")
        noted = {name: value for name, value in trajectory.metrics.items() if name != "rewrites"}
        if noted:
            self._print("metrics: " + "  ".join(f"{name} {value:g}" for name, value in noted.items()))
        if trajectory.rewards:
            each = "  ".join(f"{name} {_number(value)}" for name, value in trajectory.rewards.items())
            self._print(f"reward {_number(trajectory.reward)}: {each}", "bold")

    # --- parts --------------------------------------------------------------------------------------------------------

    def _turn(self, role: str, parts: Sequence[object]) -> None:
        self._head(role)
        for part in parts:
            self._part(part)

    def _head(self, role: str, more: str = "") -> None:
        self._print(f"{role}{more}", f"bold {ROLES.get(role, 'white')}")

    def _part(self, part: object) -> None:
        if isinstance(part, Text):
            self._text(part.text)
        elif isinstance(part, ToolResult):
            self._print(f"  [result{f' of {part.id}' if part.id else ''}]", "yellow")
            for inner in part.parts:
                self._part(inner)
        elif isinstance(part, ToolCall):
            self._print(f"  [calls {_called(part)}]", "yellow")
        elif isinstance(part, ToolSpec):
            self._print(f"  [tool {part.name}: {json.dumps(dict(part.parameters), ensure_ascii=False, default=repr)}]")
        elif type(part) in MEDIA_KINDS:
            self._medium(part)  # type: ignore[arg-type]
        else:
            self._print(f"  [no part: {part!r:.200}]", "red")

    def _medium(self, part: MediaPart) -> None:
        kind = MEDIA_KINDS[type(part)]
        try:
            self._print(f"  [{kind} {_size(self.decode(part))}, saved as {self.files.keep(part)}]", "blue")
        except DataError as error:
            self._print(f"  [{kind} that cannot be read: {error}]", "red")

    def _text(self, text: str) -> None:
        shown = _safe(text)
        if len(shown) > LONGEST:
            half = LONGEST // 2
            shown = f"{shown[:half]}\n... {len(shown) - LONGEST:,} characters ...\n{shown[-half:]}"
        for line in shown.split("\n"):
            self.console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(_safe(text), style=style or None, markup=False, highlight=False, soft_wrap=True)


def _safe(text: str) -> str:
    """Without what would steer the terminal; half of a surrogate pair, which none can show, as an escape."""
    return text.translate(_CONTROL).encode("utf-8", "backslashreplace").decode()


def _size(decoded: Decoded) -> str:
    shape = decoded.data.shape
    if decoded.kind == "image":
        return f"{shape[1]}x{shape[0]}"
    seconds = f"{shape[0] / decoded.rate:.2f} s" if decoded.rate else ""
    return f"of {seconds}" if decoded.kind == "audio" else f"{shape[2]}x{shape[1]}, {shape[0]} frames, {seconds}"


def _called(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=repr)})"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _number(value: float | None) -> str:
    return "abstained" if value is None else f"{value:.3f}"
