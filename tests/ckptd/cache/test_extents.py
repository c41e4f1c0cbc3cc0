"""What the cache fetches for any readers: all that is wanted, nothing twice, nothing unneeded."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ckptd.cache.extents import BLOCK_BYTES, GRAIN_BYTES, Extent, Extents

_KEY = "gpt/attempts/000000000007-01HF7YAT00ABCDEFGHJKMNPQRS/shard-00000.ckpt"
_SIZE = 3 * BLOCK_BYTES + 12_345
_RANGES = st.lists(st.tuples(st.integers(0, _SIZE - 1), st.integers(1, _SIZE)), max_size=12)


@given(_RANGES, st.randoms(use_true_random=False))
def test_extents_cover_what_is_wanted_and_never_overlap(ranges: list[tuple[int, int]], random: Random) -> None:
    extents, claimed = Extents(1 << 30), []
    for start, count in ranges:
        offset, end = start, min(start + count, _SIZE)
        while offset < end:
            extent = extents.at(_KEY, offset)
            if extent is None:
                extent = extents.claim(_KEY, _SIZE, offset, end)
                assert extents.make_room(extent) == []
                extents.store(extent)
                claimed.append(extent)
            assert extent.offset <= offset < extent.end <= _SIZE
            assert Extent.parse(extent.file_name) == extent
            offset = extent.end
    assert all(one.end <= other.offset for one, other in pairwise(sorted(claimed)))
    wanted = set().union(*(_grains(start, min(start + count, _SIZE)) for start, count in ranges))
    assert sum(extent.bytes for extent in claimed) <= len(wanted) * GRAIN_BYTES
    random.shuffle(claimed)
    for extent in claimed:
        assert extents.stored_bytes >= extent.bytes
        extents.forget(extent)
        assert extents.at(_KEY, extent.offset) is None
    assert (extents.stored_bytes, extents.stored()) == (0, [])


def _grains(start: int, end: int) -> range:
    return range(start // GRAIN_BYTES, -(-end // GRAIN_BYTES))
