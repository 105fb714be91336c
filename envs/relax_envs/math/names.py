"""Letters and words inside of mathematics: variables with their indices, constants, functions without a backslash."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from relax_envs.math import atoms
from relax_envs.math.nodes import Apply, Many, Node, Sym, Value, is_node
from relax_envs.math.policy import Foreign, Unreadable
from relax_envs.math.vocabulary import (
    CALLED,
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    JOINING,
    SHORT_WORDS,
    TRIGONOMETRIC,
    WORD_CONSTANTS,
)

if TYPE_CHECKING:
    from relax_envs.math.expressions import Expressions

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_DECORATED = re.compile(r"\s*(?:\{\s*([A-Za-z]{1,3})\s*\}|([A-Za-z]{1,3}))")
_SUBSCRIPT = re.compile(r"_\s*(?:\{([^{}]{1,20})\}|\\text\{([^{}]{1,20})\}|([A-Za-z0-9]|\\[a-z]+))")


def word(r: Expressions) -> Value:
    """Letters without a backslash: a function, a constant, or variables."""
    word = r.name()
    if word in JOINING and len(word) > 1:
        raise r.unreadable()
    r.i += len(word)
    if len(word) == 1 and word in CALLED and r.s.startswith("(", r.i):
        return call(r, word)
    if word == "sqrt":
        return atoms.root(r)
    if word in FUNCTIONS and len(word) > 1:
        return atoms.function(r, FUNCTIONS[word])
    if word in WORD_CONSTANTS:
        return WORD_CONSTANTS[word]
    if word in GREEK:
        return indexed(r, word)
    if len(word) == 1:
        return letter(r, word)
    for name in (*TRIGONOMETRIC, "ln", "log", "sqrt"):
        if word.startswith(name) and len(word) == len(name) + 1:  # "sinx"
            r.i -= 1
            return atoms.root(r) if name == "sqrt" else atoms.function(r, FUNCTIONS[name])
    if len(word) > 4 or word in SHORT_WORDS or (len(word) > 2 and set(word) & set("eiou")):
        raise Unreadable(f"the word {word[:40]!r} in {r.s[:60]!r} cannot be read")
    r.i -= len(word) - 1
    return letter(r, word[0])  # the others are multiplied with it


def call(r: Expressions, name: str) -> Node:
    """A function of variables, ``f(x)``; a probability of anything, ``P(A \\cup B)``, is a variable of its own."""
    start = r.i
    args = r.bracket()
    parts = args.items if isinstance(args, Many) else (args,)
    nodes = [part for part in parts if is_node(part)]
    if len(nodes) < len(parts):
        return Sym(name + "".join(r.s[start : r.i].split()))
    return Apply("call", (Sym(name), *map(r.node, nodes)))


def letter(r: Expressions, c: str) -> Node:
    return indexed(r, c) if r.peek() in ("_", "'") else CONSTANTS.get(c) or Sym(c)


def indexed(r: Expressions, name: str) -> Sym:
    """A variable with its index and its primes."""
    if found := _SUBSCRIPT.match(r.s, r.i):
        r.i = found.end()
        name += "_" + re.sub(r"\\text|[{}\s]", "", found[1] or found[2] or found[3])
    while r.take("'"):
        name += "'"
    return Sym(name)


def text(r: Expressions) -> Value:
    found = _TEXT.match(r.s, r.i)
    if found is None:
        raise r.unreadable()
    word = found[1].strip()
    if len(word) == 1 and word.isalpha():
        r.i = found.end()
        return letter(r, word)
    if word in FUNCTIONS:
        r.i = found.end()
        return atoms.function(r, FUNCTIONS[word])
    if word in WORD_CONSTANTS:
        r.i = found.end()
        return WORD_CONSTANTS[word]
    if word in ("lim", "det", "tr", "rank", "sup", "mod"):
        raise Foreign(word)
    raise Unreadable(f"the words {word[:40]!r} in {r.s[:60]!r} cannot be read")


def decorated(r: Expressions, name: str) -> Node:
    """A letter with a bar, an arrow, an angle's name: a variable of its own."""
    found = _DECORATED.match(r.s, r.i)
    if found is None:
        raise Foreign(f"\\{name}")
    r.i = found.end()
    return indexed(r, f"{name} {found[1] or found[2]}")


def is_letter(c: str) -> bool:
    """Whether it is one of ASCII: others were respelled, or are no mathematics."""
    return c.isascii() and c.isalpha()


def is_digit(c: str) -> bool:
    return c.isascii() and c.isdigit()
