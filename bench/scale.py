"""How the cost of a save grows with the ranks: the real saver's commit code and planner over a virtual store.

Every rank writes a real receipt of 1 GB (float32 weights and Adam's moments in 129 slices, sharded over up to 128
ranks; the layers are divided among the rest) and real statistics, of tensors without elements. Rank 0 runs the saver's
committer, and so do all others until they know the outcome. Shards have no bytes: a rank's is durable after 1 GB at its
own 40 to 60 MB/s. Then ranks of other layouts plan their restores; nine ranks are sampled. Each size runs in fresh
processes, so that its memory is its own.
"""

from __future__ import annotations

import heapq
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from bench.report import Goal, Report
from bench.virtual_store import Clock, Limits, Requests, VirtualStore, lanes_of
from ckpt.saver import commit as saver
from ckpt.saver.messages import Setup
from ckptstore import threads as parallel
from ckptstore.commits.commit import write_receipt
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.format.boxes import Want
from ckptstore.format.documents import JSON, Content, Outcome, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_manifest, seal
from ckptstore.format.planning import plan_reads
from ckptstore.format.shards import EncodedChunk, Placed, Slice, chunk_table, place_slices, plan_chunks, slice_tables
from ckptstore.format.statistics import Statistics, Table, named_document, side_extension
from ckptstore.format.trees import encode_tree, unsupported
from ckptstore.names import derive_ulid, new_ulid, shard_name
from ckptstore.reading.restore_check import rows_of
from ckptstore.run import Run
from ckptstore.stores.multipart import part_bytes

COMMIT_S, REQUESTS, PLAN_S, PLAN_BYTES = 3.0, 4.0, 1.0, 1 << 30
SIZES = {True: (8, 128, 1024), False: (8, 128, 1024, 4096, 16_384)}
GROUP, TENSORS, COLUMNS, GIGABYTE = 128, 43, 4096, 10**9
KINDS = ("model/{}", "optim/state/{}/exp_avg", "optim/state/{}/exp_avg_sq")
ROWS = GIGABYTE // (TENSORS * len(KINDS) * COLUMNS * 4)
"""Rows of each tensor on a rank."""
BEGAN_AT = 1_800_000_000.0
BYTES_PER_S = (40e6, 60e6)


def measure(quick: bool) -> Report:
    """Simulate a save of each size, and plan restores from its manifest."""
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "manifest.json.zst")
        for ranks in SIZES[quick]:
            found[ranks] = in_fresh_process("save", path, ranks) | in_fresh_process("restore", path, ranks)
    last, before = found[SIZES[quick][-1]], found[SIZES[quick][-2]]
    growth = log(SIZES[quick][-1] / SIZES[quick][-2])
    names = list(last)
    return Report(
        bench="scale",
        what="1 GB per rank; 20 ms, 1,000 keys per page, 3,500 PUT and 5,500 GET per second and folder, 90 MB/s each",
        columns=("", *(f"{ranks:,} ranks" for ranks in found), "grows as ranks to the"),
        rows=[
            (
                name,
                *(f"{one[name]:.4g}" for one in found.values()),
                f"{log(last[name] / before[name]) / growth:.2f}" if last[name] > 0 and before[name] > 0 else "",
            )
            for name in names
        ],
        goals=[
            Goal("last shard to commit", "3 s", last["commit s"] / COMMIT_S, 1.0, "at most"),
            Goal("requests per rank", "4", last["requests per rank"] / REQUESTS, 1.0, "at most"),
            Goal("restore planning", "1 s", last["plan s"] / PLAN_S, 1.0, "at most"),
            Goal("memory of planning", "1 GiB", last["plan bytes"] / PLAN_BYTES, 1.0, "at most"),
        ],
        facts={f"{name}, {ranks} ranks": value for ranks, one in found.items() for name, value in one.items()},
    )


def in_fresh_process(part: str, path: Path, ranks: int) -> dict[str, float]:
    """Result of one part of the benchmark."""
    command = [sys.executable, "-m", "bench.scale", part, str(path), str(ranks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


class Save:
    """One save of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.clock = Clock(BEGAN_AT)
        self.store = VirtualStore(self.clock, Limits())
        self.run = Run(self.store, "scale", self.clock)
        session = Session(new_ulid(BEGAN_AT), None)
        self.attempt = NewAttempt(session, 1000, derive_ulid(session.id, 1000)).of(1)
        self._random = random.Random(0)
        rows = TENSORS * len(KINDS)
        self._table = Table.of([(0,) * 6] * rows)
        self.at_rank_0, self.elsewhere = Requests(), Requests()
        self.durable_at = 0.0
        """When the last shard was durable."""
        self.waiting: list[tuple[float, int]] = []
        """When each receipt was durable, and its rank."""
        self.own: StoredReceipt | None = None

    def write(self) -> None:
        """All ranks upload, and write receipts."""
        shards = [BEGAN_AT + GIGABYTE / self._random.uniform(*BYTES_PER_S) for _ in range(self.ranks)]
        self.durable_at = max(shards)
        for at, rank in sorted((at, rank) for rank, at in enumerate(shards)):
            self.clock.resume(at)
            self.store.requests = self.elsewhere if rank else self.at_rank_0
            receipt = self._write_receipt(rank)
            self.waiting.append((self.clock.now, rank))
            self.own = self.own if rank else receipt

    def commit(self) -> Outcome:
        """Rank 0 commits; the clock is at the end of that."""
        self.store.requests = self.at_rank_0
        at = next(at for at, rank in self.waiting if rank == 0)
        ended: list[Any] = []
        assert self.own is not None
        self.clock.resume(at)
        committer = saver.Committer(self.run, self._setup(0))
        committer.add(self.attempt, self.own, ended.append)
        (one,) = committer._waiting
        while not ended:
            self.clock.resume(max(self.clock.now, one.look_at))
            committer._look(one)
        if isinstance(ended[0], BaseException):
            raise ended[0]
        outcome: Outcome = ended[0]
        return outcome

    def learn(self) -> float:
        """The other ranks look for the outcome; returns when the last one knows it."""
        self.store.requests = self.elsewhere
        assert self.own is not None
        looks: list[tuple[float, int, saver.Committer, list[Any]]] = []
        for at, rank in self.waiting:
            if rank:
                self.clock.resume(at)
                committer, ended = saver.Committer(self.run, self._setup(rank)), list[Any]()
                committer.add(self.attempt, self.own, ended.append)
                looks.append((committer._waiting[0].look_at, rank, committer, ended))
        heapq.heapify(looks)
        last = 0.0
        while looks:
            at, rank, committer, ended = heapq.heappop(looks)
            (one,) = committer._waiting
            self.clock.resume(at)
            committer._look(one)
            last = max(last, self.clock.now)
            if not ended:
                heapq.heappush(looks, (one.look_at, rank, committer, ended))
            elif not isinstance(ended[0], Outcome):
                raise ended[0]
        return last

    def _setup(self, rank: int) -> Setup:
        return Setup(
            store=self.store.url, options={}, run=self.run.name, rank=rank, world_size=self.ranks, compress="off",
            peer_timeout_s=1800.0, daemon=None, token=None,
        )  # fmt: skip

    def _named_statistics(self, rank: int) -> dict[str, JSON]:
        data = seal(Statistics.of(self.attempt, rank, self._table))
        side = named_document(data, self._table, [""] * len(self._table.elements))
        return side_extension(rank, msgspec.structs.replace(side, offset=GIGABYTE))

    def _write_receipt(self, rank: int) -> StoredReceipt:
        placed = place_slices(slices_of(rank, self.ranks))
        numbers = {"torch": self._random.randbytes(5056), "others": self._random.randbytes(5000)}
        chunks = [
            EncodedChunk(b"", span.bytes, span.bytes, "raw", self._random.randbytes(16).hex())
            for span in plan_chunks(placed)
        ]
        shard = Shard(name=shard_name(rank), rank=rank, chunks=chunk_table(chunks))
        extensions = self._named_statistics(rank)
        entries, slices = slice_tables(placed)
        content = Content(shards=[shard], entries=entries, slices=slices, aliases={}, trees=trees_of(rank, placed))
        return write_receipt(
            self.run, self.attempt, content, BEGAN_AT, rank, self.ranks,
            local={"rng": encode_tree(numbers, "rng", no_leaf)}, metrics={"loss": 1.0}, extensions=extensions,
        )  # fmt: skip


def no_leaf(path: str, value: object) -> JSON:
    """All of the state is plain."""
    raise unsupported(path, value)


def slices_of(rank: int, ranks: int) -> list[Slice]:
    """Rows of the tensors of one stage."""
    group = min(GROUP, ranks)
    shape, first = (ROWS * group, COLUMNS), ROWS * (rank % group)
    names = [f"stages.{rank // group}.layers.{number}.weight" for number in range(TENSORS)]
    return [Slice(kind.format(name), "float32", shape, (first, 0, ROWS, COLUMNS)) for kind in KINDS for name in names]


def trees_of(rank: int, placed: Sequence[Placed]) -> dict[str, JSON]:
    """The owners of the tensors, the first rank of each stage, write the names."""
    names = [place.slice.entry for place in placed] if rank % GROUP == 0 else []
    leaf = {name: {"$": "tensor", "name": name} for name in names}
    model = {name.removeprefix("model/"): leaf[name] for name in names if name.startswith("model/")}
    state = {
        name: {"step": 1000, **{kind: leaf[f"optim/state/{name}/{kind}"] for kind in ("exp_avg", "exp_avg_sq")}}
        for name in model
    }
    groups = [{"params": list(model), "optimizer_class": "AdamW", "lr": 1e-4}] if names else []
    return {"model": model, "optim": {"state": state, "groups": groups}}


@contextmanager
def in_virtual_time(clock: Clock) -> Iterator[None]:
    """The code of a commit takes its time and its threads from the simulation."""
    threads = lanes_of(clock)
    with (
        patch.object(parallel, "ThreadPoolExecutor", threads),
        patch.object(saver, "ThreadPoolExecutor", threads),
        patch.object(saver, "time", clock),
    ):
        yield


def save(path: Path, ranks: int) -> dict[str, float]:
    """Simulate a save; writes its manifest to a file."""
    one = Save(ranks)
    with in_virtual_time(one.clock):
        one.write()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        held, stored = memory("VmRSS"), one.store.stored_bytes()
        outcome = one.commit()
        committed_at = one.clock.now
        peak = memory("VmHWM") - held - (one.store.stored_bytes() - stored)
        known_at = one.learn()
    path.write_bytes(one.store.get(one.run.keys.manifest(one.attempt)))
    assert outcome.committed is not None
    counts = one.at_rank_0.count + one.elsewhere.count
    parts = 2 + -(-GIGABYTE // part_bytes(1, GIGABYTE))
    return {
        "commit s": committed_at - one.durable_at,
        "all ranks know it s": known_at - one.durable_at,
        "requests per rank": counts.total() / ranks,
        **{f"{kind} per rank": counts[kind] / ranks for kind in ("PUT", "GET", "LIST")},
        "parts of a shard": parts,
        "parts at 3,500 a second s": parts * ranks / Limits().puts_per_s,
        "rank 0 requests": one.at_rank_0.count.total(),
        "rank 0 received bytes": one.at_rank_0.received_bytes,
        "rank 0 sent bytes": one.at_rank_0.sent_bytes,
        "rank 0 memory bytes": max(0, peak),
        "manifest bytes": outcome.committed.bytes,
    }


def restore(path: Path, ranks: int) -> dict[str, float]:
    """Parse the manifest, and plan the reads of sampled ranks under three layouts."""
    data = path.read_bytes()
    began = time.process_time()
    content = parse_manifest(data, "manifest").content
    parsed_s = time.process_time() - began
    plans = []
    for others in (ranks // 2, ranks * 2, ranks):
        stages = 1 if others == ranks else max(1, ranks // GROUP)  # the last layout shards everything over all ranks
        for rank in (0, others // 2, others - 1):
            began = time.process_time()
            plan_reads(content, wants_of(content.entries.name, content.entries.shape, rank, others, stages))
            plans.append(time.process_time() - began)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"parse s": parsed_s, "plan s": parsed_s + max(plans), "plan bytes": peak}


def wants_of(names: Sequence[str], shapes: Sequence[Sequence[int]], rank: int, ranks: int, stages: int) -> list[Want]:
    """The rows of a rank of one stage, or of all tensors if there is one stage only."""
    group = max(1, ranks // stages)
    mark = f"stages.{rank // group}." if stages > 1 else ""
    wants = []
    for name, shape in zip(names, shapes, strict=True):
        first, rows = rows_of(shape[0], rank % group, group)
        if mark in name and rows:
            wants.append(Want(name, (first, 0, rows, shape[1]), name))
    return wants


def memory(name: str) -> int:
    """Bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


if __name__ == "__main__":
    work = {"save": save, "restore": restore}
    print(json.dumps(work[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
