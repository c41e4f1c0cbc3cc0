from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.clock import system_clock
from ckptstore.errors import CorruptObject
from ckptstore.format.boxes import check_cover
from ckptstore.format.documents import Receipt, ReceiptRef, digest
from ckptstore.format.merging import StoredReceipt, checked, merge, without_optimizer
from ckptstore.format.parsing import check_manifest, manifest_bytes, parse_part, parse_sealed, seal
from ckptstore.format.planning import entry_bytes
from ckptstore.format.shards import EncodedChunk, Placed, Slice, chunk_table, slice_tables
from ckptstore.names import Attempt, new_ulid
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, write_rank

ATTEMPT = Attempt(1, new_ulid(system_clock()))
ARRAYS = sample_arrays()
COLUMNS = ("entry", "shard", "at", "box", "raw", "stored", "codec")


def of_rank(rank: int, *names: str) -> Receipt:
    store = open_store("memory://merging")
    return write_rank(store, "gpt", ATTEMPT, {name: ARRAYS[name] for name in names}, rank, 2).receipt


FIRST, SECOND = of_rank(0, "model/ids", "model/half"), of_rank(1, *sorted(ARRAYS.keys() - {"model/ids", "model/half"}))


def with_column(receipt: Receipt, name: str, numbers: np.ndarray[Any, Any]) -> Receipt:
    """The receipt with another column of slices or chunks."""
    content, replace = receipt.content, msgspec.structs.replace
    if name in COLUMNS[:4]:
        changed = replace(content, slices=replace(content.slices, **{name: numbers}))
    else:
        (shard,) = content.shards
        changed = replace(content, shards=[replace(shard, chunks=replace(shard.chunks, **{name: numbers}))])
    return replace(receipt, content=changed)


def column_of(receipt: Receipt, name: str) -> np.ndarray[Any, Any]:
    content = receipt.content
    found: np.ndarray[Any, Any] = getattr(content.slices if name in COLUMNS[:4] else content.shards[0].chunks, name)
    return found


def stored(receipt: Receipt) -> StoredReceipt:
    """The receipt as a merge reads it."""
    data = seal(receipt)
    return StoredReceipt.of(parse_part(data, f"receipt {receipt.rank}"), data)


def read(receipts: Sequence[Receipt]) -> list[StoredReceipt]:
    """The receipts as a committer reads those that have appeared."""
    found = [(data, parse_part(data, f"receipt {rank}")) for rank, data in enumerate(map(seal, receipts))]
    return checked([(one, ReceiptRef(rank=one.rank, digest=digest(data), bytes=len(data))) for data, one in found])


@given(st.data())
def test_a_receipt_that_readers_refuse_is_not_merged(data: st.DataObject) -> None:
    """Neither by itself, nor because another rank's rows make up for what is wrong with its own."""
    receipts = [FIRST, SECOND]
    for _ in range(data.draw(st.integers(1, 2))):
        which, name = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(COLUMNS))
        numbers = column_of(receipts[which], name).copy()
        at = data.draw(st.integers(0, len(numbers) - 1))
        how = data.draw(st.sampled_from(["change", "remove", "insert"]))
        number = data.draw(st.integers(0, 5) | st.integers(0, 1 << 40))
        if how == "change":
            numbers[at] = number
        else:
            numbers = np.delete(numbers, at) if how == "remove" else np.insert(numbers, at, number)
        receipts[which] = with_column(receipts[which], name, numbers)
    try:
        manifest = merge(read(receipts))
    except CorruptObject:
        return
    for receipt in receipts:
        parse_sealed(seal(receipt), Receipt, "receipt")
    assert manifest.content.entries.name


def test_the_message_names_the_receipt() -> None:
    broken = with_column(SECOND, "raw", column_of(SECOND, "raw") + (65 << 20))
    with pytest.raises(CorruptObject, match=f"the receipt of rank 1 of attempt {ATTEMPT}: .* raw size"):
        read([FIRST, broken])


def test_rows_of_a_receipt_refer_to_its_own() -> None:
    """A box too many on one rank and one too few on the next would give a manifest with boxes of the right number."""
    for name, message in (("entry", "names no entry"), ("shard", "names no shard")):
        with pytest.raises(CorruptObject, match=message):
            stored(with_column(FIRST, name, column_of(FIRST, name) + 99))
    with pytest.raises(CorruptObject, match="boxes and slices differ"):
        stored(with_column(FIRST, "box", np.append(column_of(FIRST, "box"), 1)))


def test_shards_that_were_encoded_before_give_the_same_manifest() -> None:
    receipts = [stored(FIRST), stored(SECOND)]
    manifest = merge(receipts)
    encoded = [shard for receipt in receipts for shard in receipt.shards]
    assert manifest_bytes(manifest, encoded) == manifest_bytes(manifest)


def test_the_content_of_a_thinned_checkpoint_has_no_entry_with_a_part_in_an_optimizer_shard() -> None:
    """A rank with little optimizer state has it in its first shard: the same entries go there."""
    store, half = open_store("memory://merging"), np.ones((4, 8), np.float32)
    state: dict[str, Any] = {
        "model/a": half,
        "optim/m": half,
        "extra/b": np.ones(3, np.int64),
        "extra/none": np.zeros(0, np.int64),
    }
    first = write_rank(store, "gpt", ATTEMPT, state, 0, 2).receipt
    little = write_rank(store, "gpt", ATTEMPT, {"model/c": half}, 1, 2).receipt
    entries, slices = slice_tables(
        [
            Placed(Slice("optim/m", "float32", (8, 8), (4, 0, 4, 8)), 0),
            Placed(Slice.whole("model/c", "float32", (4, 8)), 128),
        ],
        [Placed(Slice.whole("model/d", "bfloat16", (4, 8)), 128)],
    )
    content = msgspec.structs.replace(little.content, entries=entries, slices=slices)
    [shard] = content.shards
    chunks = chunk_table([EncodedChunk(b"", 256, 256, "raw", "0" * 32)])
    content = msgspec.structs.replace(content, shards=[msgspec.structs.replace(shard, chunks=chunks)])
    little = msgspec.structs.replace(little, content=content)
    tall = msgspec.structs.replace(
        first.content.entries, shape=[[8, 8] if n == "optim/m" else s for n, _, s in first.content.entries.rows()]
    )
    first = msgspec.structs.replace(first, content=msgspec.structs.replace(first.content, entries=tall))
    whole = merge([stored(first), stored(little)])
    left = without_optimizer(whole.content)
    assert set(whole.content.entries.name) - set(left.entries.name) == {"optim/m"}
    assert [shard.name for shard in left.shards] == ["shard-00000.ckpt", "shard-00001.ckpt"]
    check_manifest(msgspec.structs.replace(whole, content=left, extensions={}), "it is valid")
    check_cover(left)
    assert [left.entries.name[int(left.slices.entry[row])] for row in left.slices.derived_rows] == ["model/d"]
    sizes = {name: size for name, size in entry_bytes(whole.content).items() if name != "optim/m"}
    assert entry_bytes(left) == sizes
