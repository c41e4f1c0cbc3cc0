from __future__ import annotations

import pytest

from ckptapi.bodies import EntryBody, ShardBody
from ckptd.pages.contents import bars, contents_view


@pytest.mark.parametrize("world_size", [1, 7, 128, 129, 4096])
def test_bars_stand_for_all_ranks(world_size: int) -> None:
    drawn = bars([rank % 5 for rank in range(world_size)], "rank", str)
    assert len(drawn.bars) <= 128
    assert drawn.bars[-1].title.split(":")[0].endswith(str(world_size - 1))
    assert all(0 <= bar.mean <= bar.largest <= drawn.bottom for bar in drawn.bars)
    assert all(drawn.left <= bar.x and bar.x + bar.width <= drawn.right for bar in drawn.bars)


def test_contents_of_many_ranks_are_summed_by_rank_and_item() -> None:
    shards = [
        ShardBody(name=f"shard-{rank:05d}.ckpt", rank=rank, num_chunks=1, num_entries=1, raw_bytes=2, stored_bytes=rank)
        for rank in range(1000)
    ]
    entries = [
        EntryBody(name=f"{item}/w{i}", dtype="uint8", shape=[i], num_slices=1, raw_bytes=i)
        for item in ("model", "optim")
        for i in range(40)
    ]
    view = contents_view(4096, shards, entries, {})
    assert (view.num_writers, view.shards[0].rank) == (999, 999)
    assert view.items == [("model", 40, 780), ("optim", 40, 780)]
    assert [entry.raw_bytes for entry in view.entries[:3]] == [39, 39, 38]
    assert contents_view(2**40, shards, entries, {}).num_writers == 999
