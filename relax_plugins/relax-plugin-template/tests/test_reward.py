from __future__ import annotations

from relax_core.testing import check_reward
from relax_core.testing.reward_plays import played

from relax_plugin_template.reward import Near

EXAMPLES = [
    (played("tree", answer="tree"), 1.0),
    (played("TREE", answer="tree"), 1.0),
    (played("trio", answer="tree"), 0.5),
    (played("", answer="tree"), 0.0),
    (played("tree"), None),
]
"""What was played, and what it is worth; None: the reward abstains."""


def test_it_keeps_the_promises_of_a_reward() -> None:
    check_reward(Near(Near.Config()), EXAMPLES)


def test_with_case() -> None:
    check_reward(Near(Near.Config(ignore_case=False)), [(played("TREE", answer="tree"), 0.0)])
