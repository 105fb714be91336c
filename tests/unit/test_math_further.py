"""Reward ``math`` on kinds of answers that were once graded wrongly, each with the right verdict."""

from __future__ import annotations

import pytest

from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.math import Math

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("gold", "reply", "right"),
    [
        # zeros that only rounding hides
        ("0", r"\boxed{\cos 90^\circ}", True),
        ("0", r"\boxed{\cos\frac{\pi}{2}}", True),
        ("1", r"\boxed{1+\cos 90^\circ}", True),
        ("2", r"\boxed{2+\sin\pi}", True),
        ("-1", r"\boxed{\cos\pi+i\sin\pi}", True),
        ("0", r"\boxed{\cos 89^\circ}", False),
        ("0", r"\boxed{\sin 10^{-30}}", False),
        # inequalities speak of a variable
        ("x<3", r"\boxed{x<3}", True),
        ("x<3", r"\boxed{y<3}", False),
        ("1<x<3", r"\boxed{1<y<3}", False),
        (r"a\ge2", r"\boxed{b\ge2}", False),
        (r"(-\infty,3)", r"\boxed{x<3}", True),
        # spellings
        (r"\frac12", r"\boxed{{1 \over 2}}", True),
        ("1/2", r"\boxed{1\over 2}", True),
        (r"{1 \over 2}", r"\boxed{0.5}", True),
        (r"{1 \over 2}", r"\boxed{1 \over 3}", False),
        ("1500", r"\boxed{1.5x10^3}", True),
        ("1500", r"\boxed{1.5 x 10^3}", True),
        ("5", r"\boxed{\textcolor{red}{5}}", True),
        ("5", r"\boxed{{\color{blue}5}}", True),
        # a number inside of a program
        ("4", "4 if __import__('os').system('touch PWNED') else 4", False),
        ("4", "4; import os; os.system('touch PWNED')", False),
        ("4", "so we get 4", True),
    ],
)
def test_right_and_wrong(gold: str, reply: str, right: bool) -> None:
    assert rewarded(Math, played(reply, answer=gold)) == float(right)
