"""The last client of format 1 and today's act on one run at random: no checkpoint that a rule keeps is lost or misread.

The old client is taken from the history of this repository and runs in a process of its own. Without the history, as
in a shallow clone, the test is skipped. CKPTD_OLD_AND_NEW=100 tries as many lives.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints, newest_first
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.retention.deletion import undelete
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.integration.old_client import RUN, Client, arrays, whole
from tests.support.checkpoints import write_checkpoint
from tests.support.waiting import Lines

ROOT = Path(__file__).parents[2]
SEEDS = range(int(os.environ.get("CKPTD_OLD_AND_NEW", "2")))
STEPS = 30
DAY_S = 24 * 3600.0
NEWER = "unsupported_format"


def git(*arguments: str) -> bytes:
    """What git prints; empty if it fails, or is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the last commit before format 2."""
    found = git("log", "--format=%H", "-SFORMAT = 2", "--", "client/ckptstore/format/documents.py").split()
    archive = git("archive", f"{found[-1].decode()}^", "client", "tests/support", "tests/__init__.py") if found else b""
    if not archive:
        pytest.skip("the history of the repository is not here")
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


class OldClient:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        self._requests = process.stdin
        self._replies = Lines(process.stdout)
        assert json.loads(self._replies.next()) == {"format": 1}

    def __call__(self, act: str, **arguments: Any) -> tuple[Any, str]:
        self._requests.write(json.dumps({"act": act, **arguments}) + "\n")
        self._requests.flush()
        reply = json.loads(self._replies.next())
        return reply.get("result"), reply.get("error", "")


@contextmanager
def old_client(tree: Path, url: str) -> Iterator[OldClient]:
    command = [sys.executable, str(ROOT / "tests/integration/old_client.py"), url]
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'client'}{os.pathsep}{tree}"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree, env=environment
    ) as process:
        try:
            yield OldClient(process)
        finally:
            process.kill()


@dataclass
class Life:
    """What is known of one committed attempt."""

    digest: str
    old: bool
    """Written by the old client."""
    hidden: bool = False
    grace_s: float = 0.0
    """If it is hidden: for how long it can still be undeleted."""


@dataclass
class World:
    """A run, both clients, and what must be there."""

    url: str
    old: OldClient
    random: Random
    lives: dict[str, Life] = field(default_factory=dict)
    steps: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.store = open_store(self.url)
        self.new = Client(self.store)
        self.run = Run(self.store, RUN)

    @property
    def is_new(self) -> bool:
        """Whether there is something of format 2, so that the old client must refuse to read."""
        return self.generation > 0 or any(not life.old for life in self.lives.values())

    def visible(self, old: bool | None = None) -> list[str]:
        return sorted(a for a, life in self.lives.items() if not life.hidden and old in (None, life.old))

    # What the old client does.

    def old_saves(self) -> None:
        bases = self.visible(old=True)
        base = self.random.choice([None, *bases])
        self.steps += 1
        found, error = self.old("save", step=self.steps, value=self.steps, base=base)
        assert not error, error
        self.lives[found["attempt"]] = Life(found["digest"], old=True)

    def old_reads(self) -> None:
        found, error = self.old("list")
        if self.is_new:
            assert error == NEWER, f"it listed {found}, and not all that is there"
        else:
            assert {f["attempt"]: f["digest"] for f in found} == {a: self.lives[a].digest for a in self.visible()}
            assert all(f["whole"] for f in found)
        found, error = self.old("latest")
        if self.generation:
            assert error == NEWER, f"it would resume from {found}"
        elif not error:
            assert found == self.new.latest()

    def old_prunes(self) -> None:
        grace_s, keep = self.random.choice([0.0, 3 * DAY_S]), self.random.randint(1, 3)
        found, error = self.old("prune", keep=keep, grace_s=grace_s)
        if self.is_new:
            assert error == NEWER
        else:
            self.hidden(found["removed"], grace_s)

    def old_collects(self) -> None:
        found, error = self.old("collect")
        assert error in ("", NEWER)
        self.swept(found["swept"] if not error else [])

    # What today's client does.

    def new_begins(self) -> None:
        parent = next(newest_first(self.run), None)
        session = Session(new_ulid(system_clock()), parent.attempt if parent else None)
        self.generation = begin_generation(self.run, session).number

    def new_saves(self) -> None:
        base = self.random.choice([None, *self.visible()])
        self.steps += 1
        found = write_checkpoint(
            self.store, RUN, self.steps, arrays(self.steps), generation=self.generation,
            base=Attempt.parse(base) if base else None,
        )  # fmt: skip
        self.lives[str(found.attempt)] = Life(found.manifest_digest, old=False)

    def new_prunes(self) -> None:
        grace_s = self.random.choice([0.0, 3 * DAY_S])
        found = self.new.prune(self.random.randint(1, 3), grace_s)
        self.hidden(found["removed"], grace_s)

    def new_collects(self) -> None:
        self.swept(self.new.collect()["swept"])

    def new_undeletes(self) -> None:
        for attempt, life in self.lives.items():
            if life.hidden:
                undelete(self.run, Attempt.parse(attempt))
                life.hidden = False
                return

    def days_pass(self) -> None:
        """Every object becomes older."""
        days = self.random.choice([0.5, 2, 9])
        for path in Path(self.url).rglob("*.*"):
            os.utime(path, times=(path.stat().st_mtime - days * DAY_S,) * 2)
        for life in self.lives.values():
            life.grace_s -= days * DAY_S

    # What must be true.

    def hidden(self, removed: list[str], grace_s: float) -> None:
        for attempt in removed:
            if grace_s:
                self.lives[attempt].hidden, self.lives[attempt].grace_s = True, grace_s
            else:
                del self.lives[attempt]

    def swept(self, attempts: list[str]) -> None:
        for attempt in attempts:
            life = self.lives.pop(attempt)
            assert life.hidden, f"{attempt} was visible"
            assert life.grace_s < 60, f"{attempt} could still be undeleted"

    def check(self) -> None:
        listed = {str(c.attempt): c for c in list_checkpoints(self.run)}
        assert sorted(listed) == self.visible()
        for attempt, checkpoint in listed.items():
            assert checkpoint.manifest_digest == self.lives[attempt].digest
            assert whole(self.store, checkpoint), f"{attempt} is damaged"
        for attempt, life in self.lives.items():
            if life.hidden:
                assert Attempt.parse(attempt) in hidden_attempts(self.run).tombstoned
                assert len(list(self.store.list(RunKeys(RUN).attempt(Attempt.parse(attempt))))) >= 2


ACTS = (
    [World.old_saves] * 3 + [World.new_saves] * 3 + [World.old_reads, World.old_prunes, World.old_collects]
    + [World.new_begins, World.new_prunes, World.new_collects, World.new_undeletes, World.days_pass]
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_both_clients_in_one_life(old_tree: Path, tmp_path: Path, seed: int) -> None:
    with old_client(old_tree, str(tmp_path / "store")) as old:
        world = World(str(tmp_path / "store"), old, Random(seed))
        done = []
        for _ in range(STEPS):
            act = world.random.choice(ACTS)
            done.append(act.__name__)
            try:
                act(world)
                world.check()
            except AssertionError as error:
                raise AssertionError(f"after {', '.join(done)}: {error}") from error
        world.old_reads()
