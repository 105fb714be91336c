"""What is decided about answers that can be understood in more than one way, and how much work an answer may cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Extract = Literal["anywhere", "box"]
Boxes = Literal["last", "first", "all_equal", "any", "list"]
Percent = Literal["value", "number", "either"]
Thousands = Literal["comma", "dot", "space", "indian", "none"]
Units = Literal["optional", "ignore", "require"]
Order = Literal["kind", "strict", "free"]
Mixed = Literal["sum", "product"]

LONGEST_REPLY = 1_000_000
"""Characters of a reply, from its end, in which an answer is looked for."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The options of the reward ``math``; its settings say what each value means."""

    extract: Extract = "anywhere"
    boxes: Boxes = "last"
    percent: Percent = "value"
    thousands: Thousands = "comma"
    units: Units = "optional"
    order: Order = "kind"
    mixed: Mixed = "sum"
    tolerance: float = 0.0
    longest: int = 1000
    deepest: int = 30


class Unreadable(Exception):
    """A text that is no answer: wrong in a reply, a bad row in the data."""


class Foreign(Unreadable):
    """Mathematics that the grammar knows of and leaves to math-verify: sums, integrals, limits ..."""


class Refused(Exception):
    """More than is worth evaluating: too long, too deep, too large. Wrong in a reply, a bad row in the data."""


class Undefined(Exception):
    """No value: a division by zero, the logarithm of 0."""
