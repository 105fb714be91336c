"""What math-verify compares: mathematics that the grammar of ours does not read, within limits of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

from relax_envs.math.policy import Policy, Refused, Unreadable
from relax_envs.math.text import plain
from relax_envs.math.vocabulary import words

LONGEST = 300
SECONDS = 1.0
"""Of this process's computing time: a gold or an answer that takes longer is refused. Waiting does not count."""
COMMANDS = words(
    """frac sqrt sum prod int iint iiint oint lim infty pi theta alpha beta gamma delta epsilon
    lambda mu sigma omega phi psi rho tau eta zeta nu xi chi Delta Gamma Omega Sigma Phi Psi Theta Lambda sin
    cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp max min gcd lcm cdot times to le ge ne
    in text begin end mod bmod pmod lvert rvert lfloor rfloor lceil rceil binom mathbb cup cap setminus emptyset
    pm mp overline vec hat circ angle approx equiv sim prime langle rangle"""
)
_ALLOWED = re.compile(r"[A-Za-z0-9\s\\{}()\[\]^+*/=<>|,.!:;&'_-]*")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*d")
_POWER = re.compile(r"\^\s*(\{[^{}]*\}|\S)")
_LARGE = re.compile(r"\d{21}|\^\s*\{[^{}]*\{|__|\*\*|\d{4}\s*!|[^\da-z\s]\s*!|!\s*!|\\binom.*\d{5}")
_LARGEST_POWER = 100_000
"""The product of all numbers in exponents, at most."""


class _Overrun(BaseException):
    """Not an Exception: the libraries between catch those."""


def equal(gold: str, answer: str, policy: Policy) -> bool:
    """Whether math-verify takes both for equal, compared exactly as far as it can.

    Raises Refused where reading or comparing takes too long, Unreadable for an answer that it cannot read.
    """
    import math_verify

    a, b = _parsed(_guarded(gold, policy)), _parsed(_guarded(answer, policy))
    with _limited():
        return bool(math_verify.verify(a, b, float_rounding=40, numeric_precision=50, timeout_seconds=None))


def check(gold: str, policy: Policy) -> None:
    """Raises Unreadable or Refused for a gold that math-verify cannot read in time."""
    _parsed(_guarded(gold, policy))


def _guarded(text: str, policy: Policy) -> str:
    """The text in plain spelling; only characters, commands and sizes that are harmless. Raises Refused otherwise."""
    text = plain(text, policy)
    exponents = [int(x) for power in _POWER.findall(text) for x in re.findall(r"\d{1,9}", power)]
    if len(text) > LONGEST or _LARGE.search(text) or math.prod(max(x, 2) for x in exponents) > _LARGEST_POWER:
        raise Refused("it is too large for math-verify")
    if _DERIVATIVE.search(text):
        raise Unreadable("a derivative is not evaluated")
    if not _ALLOWED.fullmatch(text) or not set(_COMMAND.findall(text)) <= COMMANDS:
        raise Unreadable(f"{text[:60]!r} has characters or commands that are not read")
    return text


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    config = math_verify.LatexExtractionConfig()
    with _limited():
        found = math_verify.parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    if not found:
        raise Unreadable(f"{text[:60]!r} cannot be read")
    return found[0]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raises Refused when the block has computed for ``SECONDS``. Without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Overrun

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 0.1)  # again, if something swallows the first
    try:
        yield
    except _Overrun:
        raise Refused(f"it takes more than {SECONDS:g} s of computing") from None
    except (RecursionError, MemoryError):
        raise Refused("it is too large to be evaluated") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
