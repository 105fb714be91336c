"""What ``relax new-plugin`` can render: the kinds of components, each with what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One small component. Its files are ``files/<name>/*.tmpl``, of which ``tested.py.tmpl`` is its test.

    ``id``: what follows the plugin's name in its id. ``run``: what it replaces in the run file, by placeholder.
    """

    name: str
    provider: str
    id: str
    cls: str
    summary: str
    about: str
    run: Mapping[str, str]
    config: str = ""
    """Of a class whose module imports something heavy: its settings, in ``<name>_config.py``."""


RUN: Mapping[str, str] = {
    "words": 'last, of, "?", cat, dog, sun, moon, tree, fish, bird, star, rain, fire',
    "environment": "last-word",
    "reward": "exact",
    "algorithm": "grpo",
    "more": "",
}
"""What the run file says where the plugin has nothing of its own."""

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "environment",
            "relax_environments",
            "echo",
            "Echo",
            "repeat the word that was said",
            "tasks of two splits; a play over several turns, with settings",
            {"words": 'word, "?", cat, dog, sun, tree', "environment": "$name-echo, hints: 1"},
        ),
        Kind(
            "reward",
            "relax_rewards",
            "near",
            "Near",
            "share of letters that are right",
            "a number between 0 and 1; it abstains when there is nothing to compare with",
            {"reward": "$name-near"},
        ),
        Kind(
            "algorithm",
            "relax_algorithms",
            "reinforce",
            "Reinforce",
            "REINFORCE with the group's mean as baseline",
            "advantages and a loss from the shared operations; torch is imported only when it trains",
            {"algorithm": "$name-reinforce"},
        ),
        Kind(
            "modality",
            "relax_modalities",
            "ppm",
            "PortablePixmap",
            "uncompressed PPM pictures",
            "a decoder of pictures that also writes and restores what it decoded",
            {"more": "\nmodalities:\n  - {id: $name-ppm}    # reads pictures in place of the built-in decoder\n"},
        ),
        Kind(
            "engine",
            "relax_engines",
            "plain",
            "PlainEngine",
            "the whole row for each token",
            "samples tokens without cache and batch: as slow as it is short",
            {"more": "\nengine: {id: $name-plain}\n"},
            config="PlainConfig",
        ),
        Kind(
            "callback",
            "relax_callbacks",
            "best",
            "Best",
            "remembers the best step",
            "a hook, and state that survives a restart",
            {"more": "\ncallbacks:\n  - {id: $name-best}\n"},
        ),
    )
}
