"""What tests of algorithms share, those of plugins too."""

from __future__ import annotations

from typing import Any


def aggregations(constant: int = 12) -> list[dict[str, Any]]:
    """Settings for every way in which token losses become one number."""
    return [
        {"aggregation": "token-mean"},
        {"aggregation": "sequence-mean"},
        {"aggregation": "sequence-sum"},
        {"aggregation": "constant", "constant": constant},
        {"aggregation": "prompt-mean"},
    ]
