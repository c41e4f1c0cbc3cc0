"""A store with something of everything to look at, names included that are no markup and must not become any."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ckpt.saver.messages import SaveJob, Setup
from ckpt.saver.pipeline import SavePipeline
from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.catalog import Checkpoint, from_outcome
from ckptstore.commits.commit import commit_attempt
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.format.documents import FORMAT, Generation
from ckptstore.format.parsing import seal
from ckptstore.format.records import ORIGIN, Heartbeat, Policy, PolicySet, TrainerEnd
from ckptstore.format.shards import Placed, Slice
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.pins import pin
from ckptstore.retention.policy import change_policies
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint, write_rank
from tests.support.daemons import join
from tests.support.histories import History
from tests.support.waiting import present

SCRIPT = "<script>alert(1)</script>"
IMAGE = "model/<img src=x onerror=alert(1)>.weight"
LONG = "pretraining-with-a-very-long-name-that-does-not-end-soon_2026-11-20.attempt-17.resumed-from-" + "yesterday" * 4
NUM_STEPS = 60
WORLD = 48
SMALL = {"model/weight": np.arange(500, dtype=np.float32)}


@dataclass(frozen=True, slots=True)
class Shown:
    sharded: Checkpoint
    """Written by many ranks; in it, entries with strange names."""
    live: Attempt
    """Of run `vit`: two of its four ranks are done."""


def fill(store: Store) -> Shown:
    """A run with a history, one of many ranks, one with a long name, one that is saving."""
    now = system_clock()
    for i in range(NUM_STEPS):
        at = now - (NUM_STEPS - i) * 900
        metrics = {"loss": 0.3 + 2.5 * math.exp(-i / 15), "val_loss": 0.4 + 2.6 * math.exp(-i / 16), SCRIPT: float(i)}
        written = write_checkpoint(store, "gpt", i * 500, SMALL, metrics, _always(at))
        if i == 10:
            pin(Run(store, "gpt", by="tests"), written.attempt, "paper")
    write_checkpoint(store, LONG, 7, SMALL, clock=_always(now - 3 * 86400))
    _running(store, "gpt", now)
    change_policies(
        store, PolicySet(default=Policy(keep_last=5, keep_best=("val_loss:min:3",))), 0, "tests", system_clock
    )
    _diverged(store)
    sharded = _sharded(store, _always(now - 4000))
    write_checkpoint(store, "vit", 1, SMALL, clock=_always(now - 60))
    _with_history(store, now - 7 * 3600)
    live = Attempt(2, new_ulid(now - 12))
    for rank in (0, 2):
        write_rank(store, "vit", live, SMALL, rank, 4)
    return Shown(sharded, live)


def begin_restore(client: DaemonClient, run: str, key: str, fractions: list[float | None]) -> str:
    """A restore session whose ranks have done so much; None: the rank has not joined. Returns its id."""
    id = ""
    for rank, fraction in enumerate(fractions):
        if fraction is None:
            continue
        id = join(client, run, key, len(fractions), rank, host=f"node-{rank + 7:02}").id
        report(client, id, rank, fraction)
    return id


def report(client: DaemonClient, id: str, rank: int, fraction: float) -> None:
    """A rank says how far it is."""
    phase = bodies.Phase.RESTORED if fraction == 1 else bodies.Phase.FETCHING
    client.report_restore(id, rank, phase, int(fraction * 4e9), int(4e9))


def _diverged(store: Store) -> None:
    """A run with statistics, and a NaN at step 40."""
    setup = Setup(
        store=store.url, options={}, run="unstable", rank=0, world_size=1, compress="fast", peer_timeout_s=60,
        daemon=None, token=None,
    )  # fmt: skip
    rng, session = np.random.default_rng(0), Session(new_ulid(system_clock()), None)
    names = [f"model/blocks.{layer}.mlp.up.weight" for layer in range(3)]
    pipeline = SavePipeline(store, setup, lambda _: None)
    for step in range(10, 70, 10):
        numbers = (rng.standard_normal((3, 4000)) * 0.02 * step).astype(np.float32)
        if step >= 40:
            numbers[1, 7] = np.nan
        rows = [Placed(Slice(name, "float32", (4000,), (0, 4000)), 16_000 * at) for at, name in enumerate(names)]
        job = SaveJob(
            number=step, slot=0, attempt=NewAttempt(session, step, new_ulid(system_clock())), slices=rows,
            created_at=system_clock(), aliases={}, trees={}, local={}, metrics={}, lease=None,
        )  # fmt: skip
        pipeline.submit(job, numbers.data.cast("B"))
    pipeline.close()


def _sharded(store: Store, clock: Clock) -> Checkpoint:
    attempt = Attempt(9000, new_ulid(clock()))
    receipts = []
    for rank in range(WORLD):
        arrays = {f"optim/state.{rank}.exp_avg": np.full(300 + 20 * (rank % 7), rank, dtype=np.float32)}
        if rank == 0:
            for block in range(12):
                for name, count in (("attn.qkv", 900), ("attn.proj", 300), ("mlp.up", 1200), ("mlp.down", 1200)):
                    arrays[f"model/blocks.{block}.{name}.weight"] = np.zeros(count, dtype=np.float32)
            arrays[IMAGE] = np.zeros(3000, dtype=np.float32)
        receipts.append(
            write_rank(store, "fsdp", attempt, arrays, rank, WORLD, {"loss": 2.5} if not rank else {}, clock)
        )
    return present(from_outcome(commit_attempt(Run(store, "fsdp", _always(clock() + 8)), receipts)))


def _running(store: Store, name: str, now: float) -> None:
    """A heartbeat of a moment ago."""
    run, id = Run(store, name, by="tests"), new_ulid(now - NUM_STEPS * 900)
    heartbeat = Heartbeat(
        format=FORMAT, kind="heartbeat", run=name, id=id, by="tests", began_at=now - NUM_STEPS * 900 - 60,
        trains_at=now - NUM_STEPS * 900, restored_s=0.0, parent=None, generation=0, at=[now], step=[NUM_STEPS * 500],
        stalled_s=[40.0], slowed_s=[0.0], ended=TrainerEnd.NOT, ended_at=now,
        extensions=_origin("ada", "node-07", 48213),
    )  # fmt: skip
    store.put(run.keys.heartbeat(id), seal(heartbeat))


def _origin(user: str, host: str, job: int) -> dict[str, object]:
    return {ORIGIN: {"user": user, "host": host, "job": f"slurm {job}"}}


def _always(moment: float) -> Clock:
    return lambda: moment


def _with_history(store: Store, began_at: float) -> None:
    """A run of six attempts, with its heartbeats and some of its checkpoints."""
    run, history = Run(store, "sim", by="tests"), History(3, began_at=began_at)
    for heartbeat in history.heartbeats(run):
        store.put(
            run.keys.heartbeat(heartbeat.id), seal(replace(heartbeat, extensions=_origin("bo", "node-11", 48007)))
        )
    for life in history.lives:
        parent = str(life.parent.attempt) if life.parent is not None else None
        begun = Generation(
            format=FORMAT, kind="generation", run="sim", number=life.number, session=new_ulid(life.began_at),
            parent=parent, by="tests", at=life.began_at,
        )  # fmt: skip
        store.put(run.keys.generation(life.number), seal(begun))
        for save in life.saves[::4]:
            write_checkpoint(
                store, "sim", save.attempt.step, SMALL, clock=_always(save.captured_at), generation=life.number
            )
