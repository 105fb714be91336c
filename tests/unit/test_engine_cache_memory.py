"""The cache of a pool that has become empty gives its memory back at once, not when the garbage collector runs."""

import gc
import weakref

from relax_core.testing.decoding import decoder, mixed_requests
from relax_core.torch.kv import SlotCache


def test_an_empty_pool_frees_its_cache_without_the_collector() -> None:
    d = decoder()
    gc.collect()
    gc.disable()
    try:
        for request in mixed_requests(6):
            d.submit(request)
        d.step("train")
        found = [o for o in gc.get_objects() if type(o) is SlotCache]
        assert len(found) == 1
        cache = weakref.ref(found.pop())
        while d.busy("train"):
            d.step("train")
        assert cache() is None
    finally:
        gc.enable()
