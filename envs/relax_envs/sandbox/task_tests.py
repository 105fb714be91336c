"""The tests of a programming task, in any of the usual forms."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from relax_envs.sandbox.names import Names, names_in


@dataclass(frozen=True, slots=True)
class StandardIO:
    """A program that reads its input and writes its output."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """A function (or method of ``Solution``) with arguments; ``expected``: values of JSON of which one is right."""

    function: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]

    def for_judge(self) -> dict[str, Any]:
        return {"function": self.function, "arguments": self.arguments, "expected": self.expected}


@dataclass(frozen=True, slots=True)
class Assertions:
    """Statements that must run without an error, and whose names are meant by those that they do not define."""

    text: str
    names: Names

    def for_judge(self) -> dict[str, Any]:
        return {"text": self.text, "theirs": self.names.theirs, "ours": self.names.ours}


Test = StandardIO | CallTest | Assertions


def read_tests(given: Any, function: str | None = None) -> list[Test]:
    """The tests in a task's answer or metadata. Raises ValueError or TypeError with the reason where none
    can be read.

    - ``[{"input": ..., "output": ...}]`` or ``{"inputs": [...], "outputs": [...]}``: standard input and output; with
      ``fn_name``, or ``"testtype": "functional"``, the arguments and the value of a function (or method of
      ``Solution``);
    - ``{"test_list": [...]}`` (with ``test_setup_code`` or ``test_imports``), a list of assertions, or a text of them;
      or with ``check(candidate)``, or functions ``test_...()``;
    - JSON text of any of these.

    ``function``: the name of the function where the tests do not say it.
    """
    if isinstance(given, str):
        return _of_text(given, function)
    if isinstance(given, Mapping):
        return _of_mapping(given, function)
    if isinstance(given, Sequence) and given and all(isinstance(one, str) for one in given):
        return [test for one in given for test in _of_python(one, function)]
    if isinstance(given, Sequence) and given and all(isinstance(one, Mapping) for one in given):
        return [test for one in given for test in _of_mapping(one, function)]
    raise ValueError(f"no tests in {type(given).__name__} {str(given)[:60]!r}")


def _of_text(text: str, function: str | None) -> list[Test]:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return read_tests(json.loads(text), function)
        except json.JSONDecodeError as error:
            raise ValueError(f"tests are not JSON: {error.msg} at character {error.pos}") from error
    return _of_python(text, function)


def _of_mapping(given: Mapping[str, Any], function: str | None) -> list[Test]:
    if "test_list" in given:
        imports = given.get("test_imports") or []
        setup = "\n".join([*([imports] if isinstance(imports, str) else imports), given.get("test_setup_code") or ""])
        return read_tests([f"{setup}\n{one}".lstrip("\n") for one in given["test_list"]], function)
    if "input" in given and "output" in given:
        name = given.get("fn_name") or (function if given.get("testtype") == "functional" else None)
        if given.get("testtype") == "functional" and not name:
            raise ValueError("a functional test needs the name of its function: 'fn_name', here or in the metadata")
        given = {"inputs": [given["input"]], "outputs": [given["output"]], "fn_name": name}
    inputs, outputs, name = given.get("inputs"), given.get("outputs"), given.get("fn_name") or None
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError("tests need 'inputs' and 'outputs', lists of one length, or 'input' and 'output'")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return [StandardIO(_lines(one), _lines(other)) for one, other in pairs]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"'fn_name' is {name!r}, not the name of a function")
    return [_call_of(name, one, other) for one, other in pairs]


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_lines, value))
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"input or output is {str(value)[:60]!r}, not text, a number or a list of lines")


def _call_of(name: str, arguments: Any, expected: Any) -> CallTest:
    """Arguments as a list, or as JSON text with one a line. A right value in a list of its own is taken as both."""
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
    if isinstance(expected, str):
        with suppress(ValueError):  # else a text as it is
            expected = json.loads(expected)
    if not isinstance(arguments, list):
        raise ValueError(f"the arguments of {name} are {arguments!r}, not a list")
    json.dumps([arguments, expected])  # as such they go to the judge; TypeError for what is no JSON
    right = (expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ()))
    return CallTest(name, tuple(arguments), right)


# --- assertions -----------------------------------------------------------------------------------------------------


def _of_python(text: str, function: str | None) -> list[Test]:
    """Each assertion by itself where there is nothing else; otherwise all of the text as it is."""
    try:
        tree = ast.parse(text)
        compile(tree, "tests", "exec", dont_inherit=True)  # which finds more
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests are not Python: {error}") from error
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("tests hold no assertion")
    check = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is not None:
        if not function or not function.isidentifier():
            raise ValueError("tests define check(candidate): name the function in the metadata as 'entry_point'")
        text = f"{text}\ncheck({function})\n"
        name = check.args.args[0].arg if check.args.args else "candidate"
        body = [_renamed(node, name, function) for node in check.body if not _says_nothing(node)]
    else:
        text += _calls(tree)
        body = list(tree.body)
    if len(body) > 0 and all(isinstance(node, ast.Assert) for node in body):
        others = [n for n in tree.body if check is not None and n is not check and not _describes(n)]
        if not others:
            return [_assertions(ast.unparse(node), function) for node in body]
    return [_assertions(text, function)]


def _calls(tree: ast.Module) -> str:
    """Calls of the functions ``test_...`` that the tests do not call themselves. Raises ValueError where no assertion
    would be run."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unused = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name not in used]
    called = [n for n in unused if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]
    for one in called:
        if one.args.args or one.decorator_list:
            raise ValueError(f"tests define {one.name} with parameters or decorators, which only pytest can run")
    run = [node for node in tree.body if node not in unused or node in called]
    if not any(isinstance(node, ast.Assert) for one in run for node in ast.walk(one)):
        raise ValueError("tests hold no assertion that is run: they define it, and do not call it")
    return "".join(f"\n{one.name}()" for one in called)


def _assertions(text: str, function: str | None) -> Assertions:
    return Assertions(text, names_in(text, function))


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _describes(node: ast.stmt) -> bool:
    """``METADATA = {...}``, as some data sets have it."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return _says_nothing(node) or (
        bool(targets) and all(isinstance(t, ast.Name) and t.id == "METADATA" for t in targets)
    )


def _renamed(node: ast.stmt, old: str, new: str) -> ast.stmt:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id == old:
            inner.id = new
    return node
