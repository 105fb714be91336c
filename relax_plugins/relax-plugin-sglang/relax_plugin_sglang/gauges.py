"""The server's own metrics, in the text format of Prometheus, as plain numbers."""

from __future__ import annotations

import math

_PREFIX = "sglang:"


def gauges(text: str) -> dict[str, float]:
    """Gauges and counters by name, without the prefix; what has several values, one for each label, is added up.

    Histograms are left out.
    """
    kinds: dict[str, str] = {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(maxsplit=3)
            kinds[name] = kind
        elif line.startswith(_PREFIX):
            name = line.partition("{")[0].partition(" ")[0]
            value = float(line.rpartition("} ")[2].split()[0] if "{" in line else line.split()[1])
            if kinds.get(name) in ("gauge", "counter") and math.isfinite(value):
                short = name.removeprefix(_PREFIX)
                found[short] = found.get(short, 0.0) + value
    return found
