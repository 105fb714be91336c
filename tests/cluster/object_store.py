"""How much lies in the cluster's object store, for tests that say how much more or less of it there is."""

from __future__ import annotations

import gc
import time

import ray

_QUIET_S = 1.5
"""Ray frees objects in batches, one a second."""


def stored_bytes() -> int:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)  # type: ignore[no-untyped-call]
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)  # type: ignore[no-untyped-call]


def settled_bytes(seconds: float = 30.0) -> int:
    """``stored_bytes`` once what earlier tests have let go of is freed: it would count as less in this one."""
    gc.collect()
    end = time.monotonic() + seconds
    found, since = stored_bytes(), time.monotonic()
    while time.monotonic() - since < _QUIET_S:
        assert time.monotonic() < end, "the object store does not settle"
        time.sleep(0.05)
        if (now := stored_bytes()) != found:
            found, since = now, time.monotonic()
    return found
