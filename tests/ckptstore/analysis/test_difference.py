"""Differences between checkpoints against the arrays themselves: other layouts, runs, types and odd values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt.saver.messages import SaveJob, Setup
from ckpt.saver.pipeline import SavePipeline
from ckptstore.analysis.difference import Difference, Side, compare
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, latest
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.format.shards import Placed, Slice
from ckptstore.names import new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import CountingStore

Array = npt.NDArray[Any]


def difference(store: Store, before: Checkpoint, after: Checkpoint) -> Difference:
    source = StoreSource(store)
    return compare(Side.open(source, before), Side.open(source, after))


def test_added_removed_reshaped_and_changed() -> None:
    store = open_store("memory://difference")
    weight = np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32)
    nudged = weight.copy()
    nudged[7, 9] += 3
    nudged[8, 1] = np.nan
    before = write_checkpoint(store, "a", 1, {"w": weight, "gone": weight[0], "cut": weight[:4], "same": weight[1],
                                              "count": np.arange(5), "flag": np.array(True)})  # fmt: skip
    after = write_checkpoint(store, "b", 9, {"w": nudged, "new": weight[0], "cut": weight[:5], "same": weight[1],
                                             "count": np.arange(5) * 2, "flag": np.array(False)})  # fmt: skip
    found = difference(store, before, after)
    assert (found.added, found.removed, found.num_equal) == (["new"], ["gone"], 1)
    (cut,) = found.reshaped
    assert (cut.name, cut.before, cut.after) == ("cut", [4, 700], [5, 700])
    changed = {one.name: one for one in found.changed}
    assert (set(changed), changed["w"].changed, changed["w"].not_finite) == ({"w", "count", "flag"}, 2, 1)
    assert changed["w"].largest == pytest.approx(3, rel=1e-6)
    assert changed["count"].changed == 4
    assert changed["count"].relative_norm == pytest.approx(1.0)
    assert changed["flag"].largest == 1
    assert difference(store, before, before).changed == []
    assert difference(store, before, before).read_bytes == 0


def save(store: Store, run: str, array: Array, ranks: int, axis: int) -> Checkpoint:
    """Save an array, cut along an axis into one slice per rank."""
    attempt = NewAttempt(Session(new_ulid(system_clock()), None), 1, new_ulid(system_clock()))
    pipelines = []
    for rank, cut in enumerate(np.array_split(np.arange(array.shape[axis]), ranks)):
        offsets, sizes = [0, 0], list(array.shape)
        offsets[axis], sizes[axis] = int(cut[0]), len(cut)
        row = Placed(Slice("w", str(array.dtype), array.shape, (*offsets, *sizes)), 0)
        setup = Setup(
            store=store.url, options={}, run=run, rank=rank, world_size=ranks, compress="fast", peer_timeout_s=60,
            daemon=None, token=None,
        )  # fmt: skip
        job = SaveJob(
            number=1, slot=0, attempt=attempt, created_at=system_clock(), slices=[row], aliases={}, trees={}, local={},
            metrics={}, lease=None,
        )  # fmt: skip
        pipelines.append(SavePipeline(store, setup, lambda _: None))
        pipelines[-1].submit(job, np.ascontiguousarray(np.take(array, cut, axis)).data.cast("B"))
    for pipeline in pipelines:
        pipeline.close()
    return latest(Run(store, run))


@pytest.mark.parametrize(("ranks", "axis"), [(1, 0), (2, 0), (4, 0), (3, 0), (2, 1)])
def test_layouts_do_not_matter(ranks: int, axis: int) -> None:
    plain = open_store(f"memory://difference-{ranks}-{axis}")
    array = np.random.default_rng(1).standard_normal((2048, 700)).astype(np.float32)
    altered = array.copy()
    altered[1900] *= 1.5
    before = save(plain, "one", array, 1, 0)
    after, store = save(plain, "other", altered, ranks, axis), CountingStore(plain)
    found = difference(store, before, after)
    (one,) = found.changed
    assert one.changed == 700
    assert one.largest == pytest.approx(np.abs(altered - array).max())
    if axis == 0 and ranks in (1, 2, 4):
        # Chunks end at even parts, so seven of eight are equal in these layouts and are not read.
        assert one.compared == array.size // 8
        assert found.read_bytes == store.read_bytes <= (before.stored_bytes + after.stored_bytes) / 7
    same = save(plain, "same", array, ranks, axis)
    assert difference(plain, before, same).changed == []
