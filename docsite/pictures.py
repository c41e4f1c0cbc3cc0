"""Makes the pictures of the dashboard that README.md and docs/ show: `make pictures`. Renew them when a page changes.

The daemon and the browser are real, and so is the store; its runs are made up.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, from_outcome
from ckptstore.commits.commit import commit_attempt
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.format.documents import FORMAT, Generation
from ckptstore.format.parsing import seal
from ckptstore.format.records import ORIGIN, Heartbeat, Policy, PolicySet, TrainerEnd
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.policy import change_policies
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.browser.webdriver import POINT_AT, Browser, missing, running_browser
from tests.support.checkpoints import write_rank
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

FOLDER = Path(__file__).parents[1] / "docs" / "assets"
_WORLD, _WIDTH, _BLOCKS = 8, 64, 16


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer of a run: which steps it saved, when, and where it ran."""

    run: str
    generation: int
    steps: range
    hours_ago: float
    """When it saved its last checkpoint."""
    step_s: float
    floor: float
    """The loss that its run approaches."""
    host: str
    job: int
    ended: TrainerEnd = TrainerEnd.NOT
    tags: tuple[tuple[str, str], ...] = ()


_PAPER = (("paper", ""),)
TRAINERS = (
    Trainer("gpt-1b", 1, range(1000, 14_001, 1000), 33.5, 4.2, 2.05, "node-07", 48213, TrainerEnd.DIED),
    Trainer("gpt-1b", 2, range(13_000, 29_001, 1000), 12.2, 4.2, 2.02, "node-11", 48377, TrainerEnd.REQUESTED),
    Trainer("gpt-1b", 3, range(30_000, 38_001, 1000), 0.4, 4.1, 2.0, "node-07", 48502),
    Trainer("gpt-1b-warm", 1, range(1000, 24_001, 1000), 50.0, 4.2, 2.2, "node-03", 47790, TrainerEnd.CLOSED, _PAPER),
    Trainer("lora-7b", 1, range(200, 2801, 200), 5.2, 3.1, 1.31, "node-02", 48466),
    Trainer("vit-l", 1, range(5000, 40_001, 5000), 0.1, 0.3, 0.92, "node-15", 48490, tags=(("sweep", "7"),)),
)  # fmt: skip


def fill(store: Store) -> None:
    """Write the runs."""
    now, seeded = system_clock(), random.Random(1)
    last: dict[tuple[str, int], Attempt] = {}
    for trainer in TRAINERS:
        run = Run(store, trainer.run, by="pictures")
        began_at = now - 3600 * trainer.hours_ago - len(trainer.steps) * trainer.steps.step * trainer.step_s
        parent = last.get((trainer.run, trainer.steps.start - trainer.steps.step))
        origin = {ORIGIN: {"user": "ada", "host": trainer.host, "job": f"slurm {trainer.job}"}}
        begun = Generation(
            format=FORMAT, kind="generation", run=run.name, number=trainer.generation, session=new_ulid(began_at),
            parent=str(parent) if parent else None, by="pictures", at=began_at, extensions=origin,
        )  # fmt: skip
        store.put(run.keys.generation(trainer.generation), seal(begun))
        at = began_at
        for step in trainer.steps:
            at += trainer.steps.step * trainer.step_s
            saved = _save(store, trainer, step, at, seeded)
            last[trainer.run, step] = saved.attempt
        for name, value in trainer.tags:
            change_labels(run, saved.attempt, LabelChange(tags={name: value}))
        beat_at = at if trainer.ended else now
        heartbeat = Heartbeat(
            format=FORMAT, kind="heartbeat", run=run.name, id=new_ulid(began_at), by="pictures", began_at=began_at,
            trains_at=began_at + 60, restored_s=9.0 if parent else 0.0, parent=str(parent) if parent else None,
            generation=trainer.generation, at=[beat_at], step=[trainer.steps[-1]], stalled_s=[20.0], slowed_s=[30.0],
            ended=trainer.ended, ended_at=beat_at, extensions=origin,
        )  # fmt: skip
        store.put(run.keys.heartbeat(heartbeat.id), seal(heartbeat))
    rules = Policy(keep_last=3, keep_every=100, keep_best=("val_loss:min:2",))
    change_policies(store, PolicySet(default=rules), 0, "pictures", system_clock)


def _save(store: Store, trainer: Trainer, step: int, at: float, seeded: random.Random) -> Checkpoint:
    attempt = Attempt(step, new_ulid(at), generation=trainer.generation)
    loss = trainer.floor + 4.5 * math.exp(-math.sqrt(step / 900)) + seeded.gauss(0, 0.02)
    metrics = {"loss": loss, "val_loss": loss + 0.07 + seeded.gauss(0, 0.01), "lr": 3e-4 * min(1.0, step / 4000)}
    receipts = [
        write_rank(store, trainer.run, attempt, dict(_arrays(rank, step)), rank, _WORLD, metrics, lambda: at)
        for rank in range(_WORLD)
    ]
    took_s = 14 + seeded.gauss(0, 1.5) + (22 if seeded.random() < 0.06 else 0)
    checkpoint = from_outcome(commit_attempt(Run(store, trainer.run, lambda: at + took_s), receipts))
    assert checkpoint is not None
    return checkpoint


def _arrays(rank: int, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """The blocks of one rank, of a small transformer with AdamW."""
    numbers = np.random.default_rng(step + rank)
    shapes = {"embedding": 8 * _WIDTH} if not rank else {}
    for block in range(rank * _BLOCKS // _WORLD, (rank + 1) * _BLOCKS // _WORLD):
        parts = (("attn.qkv", 3), ("attn.proj", 1), ("mlp.up", 4), ("mlp.down", 4))
        shapes |= {f"blocks.{block}.{part}": size * _WIDTH for part, size in parts}
    for name, rows in shapes.items():
        own = numbers.standard_normal((rows, _WIDTH), dtype=np.float32)
        yield f"model/{name}.weight", own
        yield f"optim/exp_avg.{name}.weight", own * 0.1
        yield f"optim/exp_avg_sq.{name}.weight", own * own


def take(browser: Browser, daemon: Daemon) -> None:
    """Write the pictures."""
    for scheme in ("light", "dark"):
        browser.look(1280, scheme, 1010)
        for run in sorted({trainer.run for trainer in TRAINERS}):
            browser.open(f"{daemon.url}/runs/{run}")  # from now on, the list of runs knows who runs it
        wait_until(lambda: "ada@node-15" in _shown(browser, f"{daemon.url}/"), "the origins of the runs")
        browser.look(1280, scheme, 520)
        browser.picture(FOLDER / f"runs-{scheme}.png", whole=False)
        browser.look(1280, scheme, 1010)
        browser.open(f"{daemon.url}/runs/gpt-1b?metric=loss&also=val_loss&other=gpt-1b-warm")
        browser.run(POINT_AT, 0.52)
        browser.picture(FOLDER / f"run-{scheme}.png", whole=False)
        browser.open(f"{daemon.url}/checkpoints/gpt-1b@38000")
        browser.picture(FOLDER / f"checkpoint-{scheme}.png", whole=False)


def _shown(browser: Browser, url: str) -> str:
    browser.open(url)
    return browser.text()


def main() -> None:
    """Make the pictures."""
    if absent := missing():
        sys.exit(f"needs {' and '.join(absent)}: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        fill(store)
        with running_daemon(store.url) as daemon, running_browser() as browser:
            take(browser, daemon)


if __name__ == "__main__":
    main()
