"""A Dask cluster of this host, whose workers are processes; the test is skipped if Dask is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def running_dask(workers: int) -> Iterator[tuple[Any, str]]:
    """The cluster, which starts another worker for each that dies, and its address as an engine."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        yield cluster, cluster.scheduler_address.replace("tcp:", "dask:")
