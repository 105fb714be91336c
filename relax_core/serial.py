"""Messages, tasks, trajectories and any value as JSON and back: complete, strict, media named by content hash.

A medium is never inside the JSON: ``{"type": "image", "hash": ...}`` says which one, and a ``Load`` function finds it
again when somebody looks at its data.
"""

from __future__ import annotations

import base64
import json
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from relax_core.errors import DataError
from relax_core.types import (
    MEDIA_KINDS,
    Audio,
    Decoded,
    Image,
    MediaKind,
    MediaPart,
    MediaRef,
    Message,
    Part,
    PlayError,
    Sample,
    Stop,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
    Video,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Decode = Callable[[MediaPart], Decoded]
"""Gives a medium's decoded content, such as ``MediaStore.decode``; raises DataError for an unreadable one."""

Load = Callable[[MediaKind, str], Decoded]
"""Gives the decoded content of a kind and a hash, such as ``TrajectoryFiles.media``."""

MEDIA_TYPES: dict[MediaKind, type[Image] | type[Audio] | type[Video]] = {"image": Image, "audio": Audio, "video": Video}


# --- JSON text --------------------------------------------------------------------------------------------------------


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> bytes:
    """Compact JSON on one line, letters of every script as they are. Raises ValueError for NaN and inf."""
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold: write escapes
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


# --- any value --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands for a value that JSON cannot hold: its type and the beginning of its ``repr``."""

    type: str
    text: str


def pack(value: Any) -> Any:
    """A JSON value that ``unpack`` turns back: also tuples, sets, bytes, paths, arrays, NaN and keys that are no text.

    What else there is becomes an ``Opaque``: an odd object in a task's metadata must not end a run.
    """
    kind = type(value)  # the usual types first: this runs for every trajectory of a step
    if kind is str or kind is int or value is None or kind is bool:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is list:
        return [pack(v) for v in value]
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        return {key: pack(v) for key, v in value.items()}
    return _pack_object(value)


def _pack_object(value: Any) -> Any:
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, Mapping):
        pairs = dict(value)
        plain = type(value) is not dict and all(type(key) is str and key[:1] != "$" for key in pairs)
        return pack(pairs) if plain else {"$map": [[pack(key), pack(v)] for key, v in pairs.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [pack(v) for v in value]}
    if isinstance(value, set | frozenset):
        return {"$set": sorted((pack(v) for v in value), key=dumps)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"$path": str(value)}
    if isinstance(value, Opaque):
        return {"$opaque": [value.type, value.text]}
    dtype = getattr(value, "dtype", None)
    if type(value).__module__ == "numpy" and dtype is not None and dtype.kind in "biufcSU":  # a scalar has shape ()
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    return {"$opaque": [f"{type(value).__module__}.{type(value).__qualname__}", repr(value)[:200]]}


def unpack(value: Any) -> Any:
    """The value that was packed; tuples, sets and arrays are again what they were, a mapping becomes a dict.

    Raises DataError for an unknown tag.
    """
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag[:1] != "$":
        return {key: unpack(v) for key, v in value.items()}
    return _unpack_object(tag, value[tag])


def _unpack_object(tag: str, content: Any) -> Any:
    match tag:
        case "$float":
            return float(content)
        case "$map":
            return {unpack(key): unpack(v) for key, v in content}
        case "$tuple":
            return tuple(unpack(v) for v in content)
        case "$set":
            return frozenset(unpack(v) for v in content)
        case "$bytes":
            return base64.b64decode(content)
        case "$path":
            return Path(content)
        case "$array":
            return _array(*content)
        case "$opaque":
            return Opaque(*content)
    raise DataError(f"stored value: unknown tag {tag!r}; another version of Relax wrote it")


def _array(dtype: str, shape: list[int], content: str) -> Any:
    import numpy as np

    array = np.frombuffer(base64.b64decode(content), np.dtype(dtype)).reshape(shape)
    return array.copy() if shape else array[()]


def fields(data: Mapping[str, Any], where: str, names: Collection[str]) -> tuple[Any, ...]:
    """The named values, in order. Raises DataError when one is missing or another one is there."""
    if set(data) != set(names):
        wrong = ", ".join(sorted(set(data) ^ set(names)))
        raise DataError(f"stored {where}: fields {', '.join(names)} are expected; missing or unknown: {wrong}")
    return tuple(data[name] for name in names)


# --- media ------------------------------------------------------------------------------------------------------------


class Stored(Decoded):
    """A decoded medium that is loaded when its data are first looked at. ``kind`` and ``hash`` are known before."""

    __slots__ = ("_found", "_load")

    _load: Load
    _found: Decoded | None

    def __init__(self, kind: MediaKind, hash: str, load: Load) -> None:
        for name, value in (("kind", kind), ("hash", hash), ("_load", load), ("_found", None)):
            object.__setattr__(self, name, value)

    def loaded(self) -> Decoded:
        """The medium itself, loaded once."""
        if self._found is None:
            object.__setattr__(self, "_found", self._load(self.kind, self.hash))
        assert self._found is not None
        return self._found

    @property
    def data(self) -> NDArray[Any]:
        return self.loaded().data

    @property
    def rate(self) -> float | None:
        return self.loaded().rate

    @property
    def times(self) -> tuple[float, ...] | None:
        return self.loaded().times

    def __repr__(self) -> str:
        return f"Stored({self.kind!r}, {self.hash!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoded, (self.kind, self.data, self.rate, self.hash, self.times)


def _medium_to_json(part: MediaPart, decode: Decode) -> dict[str, Any]:
    kind, source = MEDIA_KINDS[type(part)], part.source
    found: dict[str, Any] = {"type": kind}
    if isinstance(source, Path):
        found["path"] = str(source)
    try:
        found["hash"] = source.hash if isinstance(source, Decoded) else decode(part).hash
    except (DataError, OSError) as error:
        found["unreadable"] = str(error)
    return found


def _medium_from_json(data: Mapping[str, Any], load: Load) -> MediaPart:
    make = MEDIA_TYPES[data["type"]]
    if "unreadable" in data:
        return make(Path(data["path"]) if "path" in data else b"")
    return make(Stored(data["type"], data["hash"], load))


# --- messages ---------------------------------------------------------------------------------------------------------


def message_to_json(message: Message, decode: Decode) -> dict[str, Any]:
    return {"role": message.role, "parts": [part_to_json(p, decode) for p in message.parts]}


def message_from_json(data: Mapping[str, Any], load: Load) -> Message:
    role, parts = fields(data, "message", ("role", "parts"))
    return Message(role, tuple(part_from_json(p, load) for p in parts))


def part_to_json(part: Part, decode: Decode) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, ToolCall):
        return {"type": "tool_call", "name": part.name, "arguments": pack(part.arguments), "id": part.id}
    if isinstance(part, ToolResult):
        return {"type": "tool_result", "parts": [part_to_json(p, decode) for p in part.parts], "id": part.id}
    if isinstance(part, ToolSpec):
        spec = {"name": part.name, "description": part.description, "parameters": pack(part.parameters)}
        return {"type": "tool_spec", **spec}
    return _medium_to_json(part, decode)


def part_from_json(data: Mapping[str, Any], load: Load) -> Part:
    kind = data.get("type")
    if kind == "text":
        return Text(fields(data, "text", ("type", "text"))[1])
    if kind == "tool_call":
        _, name, arguments, id = fields(data, "tool call", ("type", "name", "arguments", "id"))
        return ToolCall(name, unpack(arguments), id)
    if kind == "tool_result":
        _, parts, id = fields(data, "tool result", ("type", "parts", "id"))
        inner = tuple(part_from_json(p, load) for p in parts)
        return ToolResult(cast("tuple[Text | MediaPart, ...]", inner), id)
    if kind == "tool_spec":
        return ToolSpec(*map(unpack, fields(data, "tool", ("type", "name", "description", "parameters"))[1:]))
    if kind in MEDIA_TYPES and set(data) <= {"type", "path", "hash", "unreadable"}:
        return _medium_from_json(data, load)
    raise DataError(f"stored message: unknown part {kind!r} with fields {', '.join(data)}")


# --- tasks and trajectories -------------------------------------------------------------------------------------------


def task_to_json(task: Task, decode: Decode) -> dict[str, Any]:
    return {
        "id": task.id,
        "environment": task.environment,
        "messages": [message_to_json(m, decode) for m in task.messages],
        "answer": pack(task.answer),
        "metadata": pack(task.metadata),
    }


def task_from_json(data: Mapping[str, Any], load: Load) -> Task:
    names = ("id", "environment", "messages", "answer", "metadata")
    id, environment, messages, answer, metadata = fields(data, "task", names)
    parts = tuple(message_from_json(m, load) for m in messages)
    return Task(id, parts, unpack(answer), unpack(metadata), environment)


def trajectory_to_json(trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    """All but the task and the samples. A turn's ``prompt`` is null where it is the task's messages."""
    error = trajectory.error
    return {
        "attempt": trajectory.attempt,
        "member": trajectory.member,
        "turns": [_turn_to_json(t, trajectory.task, decode) for t in trajectory.turns],
        "stop": str(trajectory.stop),
        "error": error and {"where": error.where, "type": error.type, "text": error.text},
        "rewards": pack(trajectory.rewards),
        "reward": pack(trajectory.reward),
        "raw_reward": pack(trajectory.raw_reward),
        "metrics": pack(trajectory.metrics),
        "answer": trajectory.answer,
    }


def trajectory_from_json(data: Mapping[str, Any], task: Task, samples: Sequence[Sample], load: Load) -> Trajectory:
    names = ("attempt", "member", "turns", "stop", "error", "rewards", "reward", "raw_reward", "metrics", "answer")
    attempt, member, turns, stop, error, *scores = fields(data, "trajectory", names)
    return Trajectory(
        task,
        attempt,
        member,
        [_turn_from_json(t, task, load) for t in turns],
        list(samples),
        Stop(stop),
        error and PlayError(*fields(error, "error", ("where", "type", "text"))),
        *(unpack(value) for value in scores),
    )


def repeats(turn: Turn, task: Task) -> bool:
    """Whether a turn's prompt is the task's own messages: the same objects, since media may be big."""
    return len(turn.prompt) == len(task.messages) and all(map(operator.is_, turn.prompt, task.messages))


def _turn_to_json(turn: Turn, task: Task, decode: Decode) -> dict[str, Any]:
    return {
        "prompt": None if repeats(turn, task) else [message_to_json(m, decode) for m in turn.prompt],
        "reply": message_to_json(turn.reply, decode),
        "stop": str(turn.stop),
        "tokens": turn.tokens,
        "after": turn.after,
    }


def _turn_from_json(data: Mapping[str, Any], task: Task, load: Load) -> Turn:
    prompt, reply, stop, tokens, after = fields(data, "turn", ("prompt", "reply", "stop", "tokens", "after"))
    said = task.messages if prompt is None else tuple(message_from_json(m, load) for m in prompt)
    return Turn(said, message_from_json(reply, load), Stop(stop), tokens, after)


def refs_to_json(refs: Sequence[MediaRef]) -> list[list[Any]]:
    return [[ref.kind, ref.key, ref.start, ref.length] for ref in refs]


def refs_from_json(data: Sequence[Sequence[Any]]) -> tuple[MediaRef, ...]:
    return tuple(MediaRef(*ref) for ref in data)
