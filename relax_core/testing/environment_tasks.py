"""Checks of an environment's tasks: what they hold, that they stay the same, and that no split knows the other."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from relax_core import serial
from relax_core.content_hash import content_hash
from relax_core.errors import DataError
from relax_core.types import MEDIA_KINDS, Decoded, MediaPart, Message, Part, Role, Task, Text, ToolResult

if TYPE_CHECKING:
    from relax_core.interfaces import Environment, ModelAdapter

Split = Literal["train", "eval"]
THREADS = 4


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """So many of them, from the first to the last."""
    if len(tasks) <= count:
        return list(tasks)
    return [tasks[i * (len(tasks) - 1) // max(1, count - 1)] for i in range(count)]


def check_tasks(environment: Environment, limit: int, splits: Sequence[Split]) -> dict[str, list[Task]]:
    """The tasks of each split that are looked at: the first half of the limit, and the rest spread over the others."""
    found: dict[str, list[Task]] = {}
    for split in splits:
        tasks = environment.tasks(split)
        assert isinstance(tasks, Sequence), f"tasks({split!r}) is a {type(tasks).__name__}: give a sequence"
        assert len(tasks), f"tasks({split!r}) is empty: there is nothing to play"
        places = _places(len(tasks), limit)
        read = dict(_read(tasks, places))
        assert read, f"tasks({split!r}): none of {len(places)} tasks can be read"
        for place, task in read.items():
            for problem in task_problems(task):
                raise AssertionError(f"tasks({split!r})[{place}]: {problem}")
        check_copies(split, read)
        check_order(environment, split, read)
        found[split] = list(read.values())
    check_ids(found)
    check_disjoint(found)
    return found


def _places(count: int, limit: int) -> list[int]:
    if count <= limit:
        return list(range(count))
    half = limit // 2
    return [*range(half), *(half + i * (count - half) // (limit - half) for i in range(limit - half))]


def _read(tasks: Sequence[Task], places: Sequence[int]) -> Iterator[tuple[int, Task]]:
    """Bad rows (DataError) are left out, as a run does."""
    for place in places:
        try:
            yield place, tasks[place]
        except DataError as error:
            assert "\n" not in str(error), f"tasks[{place}]: a DataError of more than one line: {error}"


# --- what a task holds ------------------------------------------------------------------------------------------------


def task_problems(task: object) -> Iterator[str]:
    """What is wrong with it."""
    if not isinstance(task, Task):
        yield f"is a {type(task).__name__}, not a Task"
        return
    if not isinstance(task.id, str) or not task.id:
        yield f"its id is {task.id!r}; it must be text, and not empty"
    if not isinstance(task.messages, tuple) or not task.messages:
        yield f"task {task.id!r}: messages are {task.messages!r:.80}; give a tuple of at least one Message"
        return
    for message in task.messages:
        yield from (f"task {task.id!r}: {line}" for line in message_problems(message))


def message_problems(message: object) -> Iterator[str]:
    """What is wrong with a message that an environment says."""
    if not isinstance(message, Message):
        yield f"{message!r:.80} is a {type(message).__name__}, not a Message"
        return
    if message.role not in get_args(Role):
        yield f"a message has the role {message.role!r}; allowed are {', '.join(get_args(Role))}"
    if not isinstance(message.parts, tuple):
        yield f"the parts of a {message.role} message are a {type(message.parts).__name__}; give a tuple"
        return
    for part in message.parts:
        if isinstance(part, ToolResult) and message.role != "tool":
            yield f"a {message.role} message holds a ToolResult, which belongs into a tool message"
        for one in part.parts if isinstance(part, ToolResult) else (part,):
            if not isinstance(one, get_args(Part)):
                yield f"a {message.role} message holds {one!r:.80}, which is no part: give Text, Image, Audio, Video"
            elif isinstance(one, Text) and not isinstance(one.text, str):
                yield f"the text of a {message.role} message is a {type(one.text).__name__}: {one.text!r:.80}"


def check_media(adapter: ModelAdapter, tasks: Sequence[Task]) -> None:
    """Whatever media the tasks show can be decoded."""
    for task in tasks:
        try:
            adapter.encode(task.messages)
        except DataError as error:
            raise AssertionError(f"task {task.id!r}: cannot be shown to a model: {error}") from error


# --- the same whoever asks --------------------------------------------------------------------------------------------


def as_text(task: Task) -> bytes:
    """All that a task holds, media by their content or file."""
    return serial.dumps(serial.task_to_json(_named(task), _never))


def _named(task: Task) -> Task:
    """The task with a name in place of each medium that is not decoded yet."""
    return replace(task, messages=tuple(replace(m, parts=tuple(map(_name, m.parts))) for m in task.messages))


def _name(part: Any) -> Any:
    if isinstance(part, ToolResult):
        return replace(part, parts=tuple(map(_name, part.parts)))
    if type(part) not in MEDIA_KINDS or isinstance(part.source, Decoded):
        return part
    import numpy as np

    content = part.source if isinstance(part.source, bytes) else str(part.source).encode()
    return type(part)(Decoded(MEDIA_KINDS[type(part)], np.frombuffer(content, np.uint8)))


def _never(part: MediaPart) -> Decoded:
    raise AssertionError(f"{part} has no name")


def check_order(environment: Environment, split: Split, read: dict[int, Task]) -> None:
    """Asked again, backwards and by several threads at once, each place has the same task."""
    known = {place: as_text(task) for place, task in read.items()}

    def check(places: Sequence[int], who: str) -> None:
        tasks = environment.tasks(split)
        for place in places:
            again = tasks[place]
            assert as_text(again) == known[place], (
                f"tasks({split!r})[{place}] is {again.id!r} {who}, and was {read[place].id!r}, or holds something "
                "else: tasks have a fixed order, and are made of the settings alone"
            )

    backwards = sorted(read, reverse=True)
    check(backwards, "when asked again")
    with ThreadPoolExecutor(THREADS) as pool:
        work = [pool.submit(check, places, "in a thread") for places in (backwards, sorted(read)) * (THREADS // 2)]
        for job in work:
            job.result()


def check_copies(split: Split, read: dict[int, Task]) -> None:
    """A task crosses processes by pickle, and is in trajectory files as JSON: both give it back."""
    for place, task in read.items():
        known = as_text(task)
        try:
            pickled = pickle.loads(pickle.dumps(task))
        except Exception as error:
            raise AssertionError(f"tasks({split!r})[{place}] cannot be pickled: {error}") from error
        assert as_text(pickled) == known, f"tasks({split!r})[{place}] is another one after pickling"
        for name, value in (("answer", task.answer), ("metadata", dict(task.metadata))):
            opaque = next(_opaque(serial.unpack(serial.pack(value))), None)
            assert opaque is None, (
                f"tasks({split!r})[{place}]: its {name} holds a {opaque.type}, which trajectory files cannot keep: "
                "give text, numbers, lists, mappings or arrays"
            )
        named = _named(task)
        again = serial.task_from_json(serial.task_to_json(named, _never), _media_of(named))
        assert as_text(again) == known, f"tasks({split!r})[{place}] is another one after it was written as JSON"


def _media_of(task: Task) -> serial.Load:
    known: dict[str, Any] = {part.source.hash: part.source for m in task.messages for part in m.media()}  # type: ignore[union-attr]
    return lambda kind, hash: known[hash]


def _opaque(value: object) -> Iterator[serial.Opaque]:
    if isinstance(value, serial.Opaque):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from (found for one in pair for found in _opaque(one))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (found for one in value for found in _opaque(one))


# --- the splits -------------------------------------------------------------------------------------------------------


def check_ids(found: dict[str, list[Task]]) -> None:
    """Each id names one task of the environment."""
    counts = Counter(task.id for tasks in found.values() for task in tasks)
    twice = [id for id, count in counts.items() if count > 1]
    assert not twice, f"{len(twice)} ids name more than one task, first {twice[0]!r}: ids are unique in an environment"


def check_disjoint(found: dict[str, list[Task]]) -> None:
    """No task of the evaluation is trained."""
    train = {content_hash(task): task.id for task in found.get("train", ())}
    both = [(train[h], task.id) for task in found.get("eval", ()) if (h := content_hash(task)) in train]
    assert not both, (
        f"{len(both)} tasks have the same content in both splits, first {both[0][0]!r} of train and {both[0][1]!r} of "
        "eval: what is evaluated must not be trained"
    )
