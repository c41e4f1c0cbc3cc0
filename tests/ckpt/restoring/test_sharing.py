from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.config import Config, ReplicaReads
from ckpt.restoring import sharing
from ckpt.restoring.fetching import how_to_share
from ckpt.restoring.sharing import ShardStretch, divide
from ckptstore.format.documents import Chunks, Content, Entries, References, Shard, Slices
from ckptstore.names import shard_name
from ckptstore.stores import open_store
from tests.support.daemons import caching_daemon
from tests.support.parallel.runner import Scenario, run_named, run_scenario
from tests.support.stores import CountingStore

_RANKS = "tests.ckpt.restoring.replicas"
_REPLICAS = 4
_MOST = 1.05
_COLLECTIVE = r"(torch\.distributed|dist)\.(all_|broadcast|barrier|gather|scatter|reduce)"

MB = 1 << 20


@dataclass
class Restores:
    """What four replicas said of restores of one checkpoint, by how they shared it."""

    digest: str
    stored_bytes: int
    """Of all objects of the checkpoint."""
    by_share: dict[str, list[dict[str, Any]]]
    daemon_bytes: int
    """That the daemon read of the store for replica_reads="daemon"."""
    received: list[str]
    """Digests of what two replicas restored to other memory than the host's."""

    def read_bytes(self, replica_reads: str) -> int:
        return sum(result["read"] for result in self.by_share[replica_reads])


@pytest.fixture(scope="module")
def restores(tmp_path_factory: pytest.TempPathFactory) -> Restores:
    folder = tmp_path_factory.mktemp("replicas")
    store, at = open_store(str(folder / "store")), {"store": str(folder / "store")}
    digests = run_scenario(Scenario(f"{_RANKS}:save", _REPLICAS, at | {"steps": [1]}), folder / "save")
    stored, counting = sum(info.bytes for info in store.list("")), CountingStore(store)
    with caching_daemon(counting, folder) as url:
        before = counting.all_bytes
        scenarios = {}
        for share in ("broadcast", "none", "daemon", "auto"):
            arguments = at | {"daemon": url if share == "daemon" else None, "replica_reads": share}
            scenarios[share] = Scenario(f"{_RANKS}:restore", _REPLICAS, arguments)
        scenarios["receive"] = Scenario(f"{_RANKS}:receive", 2, at)
        results = {name: outcome.result() for name, outcome in run_named(scenarios, folder / "restore").items()}
        read = counting.all_bytes - before
    return Restores(digests[0], stored, results, read, results.pop("receive"))


@pytest.mark.parametrize("replica_reads", ["broadcast", "daemon", "none", "auto"])
def test_every_replica_gets_every_bit_and_its_own_data_position(restores: Restores, replica_reads: str) -> None:
    results = restores.by_share[replica_reads]
    assert [result["digest"] for result in results] == [restores.digest] * _REPLICAS
    assert [result["restored"][1] for result in results] == list(range(_REPLICAS))
    assert [result["log"] for result in results] == [[]] * _REPLICAS


def test_broadcast_reads_each_byte_once(restores: Restores) -> None:
    assert restores.read_bytes("broadcast") <= _MOST * restores.stored_bytes
    # And the work is divided: no replica reads as much as two should.
    parts = [result["read"] for result in restores.by_share["broadcast"]]
    assert max(parts) < 2 * restores.stored_bytes / _REPLICAS


def test_the_daemon_reads_each_byte_once(restores: Restores) -> None:
    """What the replicas read of the store themselves is documents."""
    assert restores.daemon_bytes + restores.read_bytes("daemon") <= _MOST * restores.stored_bytes
    assert restores.daemon_bytes > 20 * restores.read_bytes("daemon")


def test_what_is_passed_on_lands_in_other_memory_too(restores: Restores) -> None:
    assert restores.received == [restores.digest] * 2


def test_no_collective_uses_the_group_of_the_training() -> None:
    """NCCL would keep the connections of an exchange, and gigabytes of each GPU, for the life of the job."""
    calls = [
        call
        for path in Path(ckpt.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and re.match(_COLLECTIVE, ast.unparse(call.func))
    ]
    assert calls
    assert not [ast.unparse(call) for call in calls if "group" not in {keyword.arg for keyword in call.keywords}]


@pytest.mark.parametrize("replica_reads", ["none", "auto"])
def test_without_sharing_each_replica_reads_all(restores: Restores, replica_reads: str) -> None:
    """Also of a disk of this host, by default: its page cache is nearer than the other replicas."""
    assert restores.read_bytes(replica_reads) > 0.95 * _REPLICAS * restores.stored_bytes


@pytest.mark.parametrize(
    ("replica_reads", "daemon", "world_size", "ranks_in_environment", "expected"),
    [
        ("auto", None, 1, None, "none"), ("auto", None, 4, None, "broadcast"),
        ("auto", "http://d", 4, 4, "broadcast"), ("auto", "http://d", 1, None, "none"),
        ("auto", "http://d", 1, 4, "daemon"), ("auto", None, 1, 4, "none"),
        ("broadcast", "http://d", 1, None, "none"), ("daemon", "http://d", 4, None, "daemon"),
        ("daemon", "http://d", 1, None, "daemon"), ("none", "http://d", 4, 4, "none"),
    ],
)  # fmt: skip
def test_what_auto_means(
    monkeypatch: pytest.MonkeyPatch,
    replica_reads: ReplicaReads,
    daemon: str | None,
    world_size: int,
    ranks_in_environment: int | None,
    expected: str,
) -> None:
    for name in ("WORLD_SIZE", "CKPTD_URL", "CKPT_STORE"):
        monkeypatch.delenv(name, raising=False)
    if ranks_in_environment:
        monkeypatch.setenv("WORLD_SIZE", str(ranks_in_environment))
    config = Config("/somewhere", run="run", daemon=daemon, replica_reads=replica_reads)
    assert how_to_share(config, world_size, grouped=True, local=False) == expected
    found = how_to_share(config, world_size, grouped=True, local=True)
    assert found == ("none" if replica_reads == "auto" else expected)


Needs = list[list[tuple[int, int]]]


def _divide(content: Content, needs: Needs) -> list[list[ShardStretch]]:
    """needs: by rank."""
    ranks = {tuple(need): tuple(r for r, other in enumerate(needs) if other == need) for need in needs}
    return divide(content, {who: need for need, who in ranks.items()}, len(needs))


@st.composite
def contents_and_needs(draw: st.DrawFn) -> tuple[Content, Needs]:
    """Shards of some chunks, and which of them each rank needs: ranks of one group need the same."""
    sizes = draw(st.lists(st.lists(st.integers(1, 24 * MB), max_size=12), min_size=1, max_size=4))
    chunks = [(shard, chunk) for shard, stored in enumerate(sizes) for chunk in range(len(stored))]
    groups = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    needed = [draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks))) for _ in range(3)]
    needs = [[c for c, wanted in zip(chunks, needed[group], strict=True) if wanted] for group in groups]
    return _content(sizes), needs


def _content(sizes: list[list[int]]) -> Content:
    nothing = np.zeros(0, np.int64)
    shards = []
    for rank, stored in enumerate(sizes):
        column, raw = np.array(stored, np.int64), np.zeros(len(stored), np.int64)
        codecs = ["raw"] if stored else []
        chunks = Chunks(raw=column, stored=column, codec=raw, codecs=codecs, digest=b"\0" * 16 * len(stored))
        shards.append(Shard(name=shard_name(rank), rank=rank, chunks=chunks))
    entries = Entries(name=[], dtype=[], shape=[])
    slices = Slices(entry=nothing, shard=nothing, at=nothing, box=nothing)
    return Content(shards=shards, entries=entries, slices=slices, aliases={}, trees={})


@given(contents_and_needs())
def test_each_shared_chunk_is_read_once_by_one_that_needs_it_in_bounded_rounds(case: tuple[Content, Needs]) -> None:
    content, needs = case
    rounds = _divide(content, needs)
    wanted = Counter(chunk for need in needs for chunk in need)
    stretches = [stretch for one in rounds for stretch in one]
    passed_on = Counter((stretch.shard, chunk) for stretch in stretches for chunk in stretch.chunks)
    assert passed_on == Counter({chunk: 1 for chunk, ranks in wanted.items() if ranks > 1})
    for stretch in stretches:
        assert stretch.reader in stretch.ranks
        assert stretch.chunks == tuple(range(stretch.chunks[0], stretch.chunks[-1] + 1))
        for chunk in stretch.chunks:
            assert [rank for rank, need in enumerate(needs) if (stretch.shard, chunk) in need] == list(stretch.ranks)
        assert stretch.bytes == sum(content.shards[stretch.shard].chunks.stored[list(stretch.chunks)])
    for one in rounds:
        assert one
        assert len(one) == 1 or sum(stretch.bytes for stretch in one) <= sharing.ROUND_BYTES
    # Among ranks that need the same, none reads more than another by more than the largest stretch.
    load = Counter(dict.fromkeys(range(len(needs)), 0))
    for stretch in stretches:
        load[stretch.reader] += stretch.bytes
    largest = max((stretch.bytes for stretch in stretches), default=0)
    for ranks in {tuple(r for r, other in enumerate(needs) if other == need) for need in needs}:
        loads = [load[rank] for rank in ranks]
        assert max(loads) - min(loads) <= largest


def test_a_stretch_is_no_larger_than_one_read() -> None:
    content, needs = _content([[4 * MB] * 40]), [[(0, chunk) for chunk in range(40)]] * 8
    stretches: list[ShardStretch] = [stretch for one in _divide(content, needs) for stretch in one]
    assert {stretch.bytes for stretch in stretches} == {8 * MB}
    assert Counter(stretch.reader for stretch in stretches) == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 2, 6: 2, 7: 2}


def test_a_stretch_lies_together_although_its_chunks_are_references() -> None:
    """Neighbours in the raw stream may lie in different files, or apart in one."""
    (shard,) = _content([[100] * 6]).shards
    references = References(
        attempts=["000000000001-01HF0000000000000000000000"],
        chunk=np.array([1, 2, 4]), attempt=np.array([0, 0, 0]), offset=np.array([700, 800, 0]),
    )  # fmt: skip
    content = msgspec.structs.replace(_content([]), shards=[msgspec.structs.replace(shard, references=references)])
    every = [(0, chunk) for chunk in range(6)]
    stretches = [stretch.chunks for one in _divide(content, [every, every]) for stretch in one]
    assert sorted(stretches) == [(0,), (1, 2), (3,), (4,), (5,)]
