"""Code that asks a program's functions in the child, and reports what they gave; right values never go there.

A program that sets out to fake a report of values would have to know the right ones. Conditions, and assertions that
cannot be read as values to ask for, are judged beside the program, which could fake them: see docs/sandbox.md.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SAME = "_same_value_"
"""The function that assertions of equality call in the child."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is evaluated among the program's names: an ``expression``, or a ``function`` with ``arguments``.

    ``other``: a second expression, whose value is to be the same.
    """

    expression: str = ""
    other: str = ""
    function: str = ""
    arguments: tuple[object, ...] = ()


_SAYING = """
def _sayer(as_json):
    text, unsayable = canonical, (Unsayable, OverflowError)

    def say(value):
        try:
            return text(value, as_json)
        except unsayable:
            return None

    return say
"""

_CALLS = """
def _made(calls, as_json):
    import json, os

    report = int(os.environ.pop("RELAX_REPORT"))
    write, dumps, names, look_up, kinds, say = os.write, json.dumps, vars, getattr, type, _sayer(as_json)

    def of(text):
        return compile(text, "test", "eval") if text else None

    prepared = [(of(one), of(other), function, arguments) for one, other, function, arguments in calls]

    def asked(function, arguments, module):
        found = names(module).get(function)
        if found is None and "Solution" in names(module):
            found = look_up(names(module)["Solution"](), function)
        return found(*arguments)

    def answer(one, other, function, arguments):
        value = eval(one, names(module)) if one is not None else asked(function, arguments, module)
        if other is None:
            return {"value": say(value)}
        right = eval(other, names(module))
        said = {"value": say(value), "other": say(right)}
        if said["value"] is None and said["other"] is None:
            said["equal"] = True if value == right else False
        return said

    def send(line):
        line = dumps(line).encode() + b"\\n"
        while line:
            line = line[write(report, line):]

    def end():
        for one in prepared:
            try:
                said = answer(*one)
            except BaseException as error:
                said = {"error": kinds(error).__name__}
            send(said)

    return end

end = _made(*__CALLS__)
"""

_ASSERTS = """
def _made(tests, token):
    import os

    report = int(os.environ.pop("RELAX_REPORT"))
    write, names, say, code = os.write, vars, _sayer(False), compile(tests, "tests", "exec")

    def same(one, other):
        left, right = say(one), say(other)
        if left is None and right is None:
            return one == other
        return left == right

    def end():
        names(module)["__SAME__"] = same
        exec(code, names(module))
        write(report, token)

    return end

end = _made(*__TESTS__)
"""


@cache
def _carried() -> str:
    return Path(__file__).with_name("canonical.py").read_text(encoding="utf-8") + _SAYING


def of_calls(calls: Sequence[Call], as_json: bool = False) -> str:
    """A harness that reports a JSON object a line for each call: see ``answers``."""
    given = [(one.expression, one.other, one.function, list(one.arguments)) for one in calls]
    literal = f"json.loads({json.dumps(json.dumps([given, as_json]))})"
    return f"{_carried()}\nimport json\n{_CALLS.replace('__CALLS__', literal)}"


def answers(report: bytes) -> list[Mapping[str, Any]]:
    """What a harness of calls said, as far as it came: for each ``value``, its ``canonical`` text or None, for a
    second expression ``other`` as well, and ``equal`` where neither has a text; or ``error``, an exception's name."""
    found: list[Mapping[str, Any]] = []
    for line in report.split(b"\n")[:-1]:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        found.append(said if isinstance(said, dict) else {"error": "NoAnswer"})
    return found


def of_asserts(tests: str) -> tuple[str, bytes]:
    """A harness that runs the tests, and the token that it reports when all of them held."""
    token = secrets.token_bytes(16)
    code = _ASSERTS.replace("__SAME__", SAME).replace("__TESTS__", repr((tests, token)))
    return f"{_carried()}{code}", token
