"""One Ray cluster for all tests of this folder: to start one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A local cluster with 16 logical CPUs, to which this process is attached; its address."""
    import ray

    context = ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=2 * 10**9,
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    yield str(context.address_info["gcs_address"])
    ray.shutdown()
