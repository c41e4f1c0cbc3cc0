"""Published weights: every update reads bit-equal, whatever happens to what it is decoded on."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt import Checkpointer
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.references import marks, referenced_attempts, unmark
from ckptstore.errors import CkptError, CorruptObject, ObjectMissing, ReferenceLost, SaverDied, SweepBegun
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, RunKeys
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import SWEEP_GRACE_S, TOMBSTONE_KEPT_S, collect, hide, list_hidden, undelete
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.retention.scrubbing import due_for_scrub, scrub
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import flip
from tests.support.command_line import run as ckptctl
from tests.support.command_line import succeed
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.stores import MovableClock
from tests.support.waiting import present

UPDATES = int(os.environ.get("CKPTD_UPDATES", "36"))
"""Of a life of published weights."""
WEIGHTS = "gpt/weights"
Tensors = dict[str, torch.Tensor]


class Model(nn.Module):
    """Tied weights, a frozen part, integers, and buffers that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(400, 128)
        self.body = nn.Linear(128, 300)
        self.norm = nn.BatchNorm1d(300)
        self.frozen = nn.Linear(128, 300, dtype=torch.float64).requires_grad_(False)
        self.head = nn.Linear(128, 400, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.rand(70_000))


class Updates:
    """Updates as of reinforcement learning; every fourth changes nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=3e-6)
        self.published: dict[int, Tensors] = {}

    def next(self, checkpointer: Checkpointer) -> ckpt.SaveHandle:
        step = len(self.published)
        if step % 4 != 3:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            self.optim.step()
        handle = checkpointer.publish(self.model, step)
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        state = self.model.state_dict().items()
        self.published[step] = {f"model/{n}": rounded(t) if n in names else t.clone() for n, t in state}
        return handle


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor.clone()


def equal(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and found[name].numpy(force=True).tobytes() == tensor.numpy().tobytes()
        if tensor.dtype != torch.bfloat16
        else torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in expected.items()
    )


def published(folder: Path) -> list[Checkpoint]:
    """Oldest first."""
    return list_checkpoints(Run(open_store(str(folder)), WEIGHTS))[::-1]


@contextmanager
def publishing(folder: Path, **settings: Any) -> Iterator[Checkpointer]:
    with Checkpointer(str(folder), run="gpt", **{"writer": "thread", **settings}) as checkpointer:
        yield checkpointer


def read(folder: Path, checkpoint: Checkpoint) -> Tensors:
    return ckpt.load(f"{folder}/gpt~weights@{checkpoint.step}")


@cache
def needed(folder: Path, checkpoint: Checkpoint) -> list[int]:
    """The steps of the checkpoints that it needs, which do not change."""
    content = read_manifest(StoreSource(open_store(str(folder))), checkpoint).content
    return [attempt.step for attempt in referenced_attempts(content)]


def test_every_update_reads_bit_equal_and_chains_are_bounded(tmp_path: Path) -> None:
    updates, source = Updates(), StoreSource(open_store(str(tmp_path)))
    with publishing(tmp_path, max_references=4) as checkpointer:
        checkpointer.save(updates.model, updates.optim, 1000)
        for step in range(18):
            updates.next(checkpointer).result() if step % 3 else updates.next(checkpointer)
    found = published(tmp_path)
    assert [checkpoint.step for checkpoint in found] == [*range(18)]
    for checkpoint in found:
        assert equal(read(tmp_path, checkpoint), updates.published[checkpoint.step])
        assert verify(source, checkpoint, ranks=[3]).ok
    held = [needed(tmp_path, checkpoint) for checkpoint in found]
    assert max(map(len, held)) <= 4 + 4
    assert max(sum(step in steps for steps in held) for step in range(18)) <= 4 + 3, (
        "saves in flight do not count each other"
    )
    assert sum(c.stored_bytes for c in found[2:]) < 0.7 * 16 * found[0].stored_bytes
    with publishing(tmp_path) as checkpointer:  # a training run resumes from its own checkpoints only
        assert present(checkpointer.restore(updates.model, updates.optim)).step == 1000
        assert present(checkpointer.latest()).run == "gpt"


def test_a_restart_and_a_rollback_go_on(tmp_path: Path) -> None:
    updates = Updates()
    with publishing(tmp_path) as checkpointer:
        checkpointer.save(updates.model, updates.optim, 1)
        for _ in range(3):
            updates.next(checkpointer)
    with publishing(tmp_path) as checkpointer:
        checkpointer.restore(updates.model, updates.optim)
        restarted = [updates.next(checkpointer).result() for _ in range(2)]
        assert restarted[0].referenced_bytes, "what did not change is referenced after a restart, too"
        checkpointer.restore(updates.model, updates.optim)
        updates.published.popitem()
        again = updates.next(checkpointer).result()
        assert (again.step, again.attempt.generation) == (4, restarted[1].attempt.generation + 1)
    assert equal(read(tmp_path, again), updates.published[4])
    assert ckpt.load(f"{tmp_path}/gpt~weights@latest").keys() == updates.published[4].keys()


@pytest.mark.parametrize("how", ["flip", "delete"])
@pytest.mark.parametrize("number", range(3))
def test_what_is_damaged_or_gone_is_never_read_as_something_else(tmp_path: Path, number: int, how: str) -> None:
    updates = Updates()
    with publishing(tmp_path) as checkpointer:
        for _ in range(5):
            updates.next(checkpointer).result()
    found = published(tmp_path)
    path = tmp_path / RunKeys(WEIGHTS).shard(found[number].attempt, "shard-00000.ckpt")
    if how == "flip":
        for at in range(0, path.stat().st_size, 997):
            flip(path, at)
    else:
        path.unlink()
    wrong = [c.step for c in found if c.step == number or number in needed(tmp_path, c)]
    assert wrong[-1] == 4
    for checkpoint in found:
        if checkpoint.step not in wrong:
            assert equal(read(tmp_path, checkpoint), updates.published[checkpoint.step])
        else:
            with pytest.raises((CorruptObject, ObjectMissing)):
                read(tmp_path, checkpoint)


def test_a_base_is_kept_until_the_last_that_needs_it_is_gone(tmp_path: Path) -> None:
    updates, run = Updates(), Run(open_store(str(tmp_path)), WEIGHTS, MovableClock(0.0))
    with publishing(tmp_path) as checkpointer:
        for _ in range(4):
            updates.next(checkpointer).result()
    apply_prune(run, plan_prune(run, Policy(keep_last=1)), grace_s=0.0)
    collect(run)
    for checkpoint in published(tmp_path):
        assert equal(read(tmp_path, checkpoint), updates.published[checkpoint.step])
    assert published(tmp_path)[-1].step == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_base_is_lost_the_next_update_is_whole(tmp_path: Path, lost: int) -> None:
    """Its mark is gone, and it is deleted: nobody may do that, and still no weights are wrong."""
    updates, run = Updates(), Run(open_store(str(tmp_path)), WEIGHTS, by="me")
    with publishing(tmp_path) as checkpointer:
        for _ in range(3):
            updates.next(checkpointer).result()
        unmark(run, marks(run))
        hide(run, [published(tmp_path)[lost].attempt], "test")
        with pytest.raises(ReferenceLost):
            updates.next(checkpointer).result()
        with suppress(CkptError):  # the error of the last one
            updates.next(checkpointer).result()
        newest = updates.next(checkpointer).result()
    assert not set(needed(tmp_path, newest)) & {lost}
    assert equal(read(tmp_path, newest), updates.published[newest.step])


def test_damage_that_is_known_is_nothing_to_build_on(tmp_path: Path) -> None:
    updates, store = Updates(), open_store(str(tmp_path))
    with publishing(tmp_path) as checkpointer:
        for _ in range(2):
            updates.next(checkpointer).result()
        first, second = published(tmp_path)
        flip(tmp_path / RunKeys(WEIGHTS).shard(first.attempt, "shard-00000.ckpt"), 0)
        assert [found.ok for found in scrub(store, [first, second], "me", system_clock)] == [False, False]
        newest = updates.next(checkpointer).result()
    assert needed(tmp_path, newest) == []
    assert equal(read(tmp_path, newest), updates.published[2])


def test_a_remote_tier_gets_what_is_needed(tmp_path: Path) -> None:
    updates, remote = Updates(), tmp_path / "remote"
    with publishing(remote, local=str(tmp_path / "local"), replicate_every=2) as checkpointer:
        for _ in range(5):
            updates.next(checkpointer).result()
    shutil.rmtree(tmp_path / "local")
    assert published(remote)[-1].step == 4
    for checkpoint in published(remote):
        assert equal(read(remote, checkpoint), updates.published[checkpoint.step])
        assert verify(StoreSource(open_store(str(remote))), checkpoint).ok


def test_nothing_is_referenced_if_nothing_may_be(tmp_path: Path) -> None:
    updates = Updates()
    with publishing(tmp_path, max_references=0) as checkpointer:
        handles = [updates.next(checkpointer) for _ in range(3)]
    assert [handle.timings.referenced_bytes for handle in handles] == [0, 0, 0]
    assert equal(read(tmp_path, published(tmp_path)[-1]), updates.published[2])


def test_a_saver_that_is_killed_leaves_what_reads_right_or_nothing(tmp_path: Path) -> None:
    updates = Updates()
    with publishing(tmp_path, writer="process") as checkpointer:
        for _ in range(3):
            for _ in range(3):
                with suppress(SaverDied):
                    updates.next(checkpointer)
            publisher = present(checkpointer._publisher)
            if publisher.saver_pid is not None:
                os.kill(publisher.saver_pid, signal.SIGKILL)
            with suppress(SaverDied):
                checkpointer.wait()
        with suppress(SaverDied):
            updates.next(checkpointer)
        updates.next(checkpointer).result()
    found = published(tmp_path)
    assert found[-1].step == len(updates.published) - 1
    for checkpoint in found:
        assert equal(read(tmp_path, checkpoint), updates.published[checkpoint.step])


def test_copies_and_exports_are_whole(tmp_path: Path) -> None:
    updates, folder, other = Updates(), tmp_path / "one", tmp_path / "two"
    with publishing(folder) as checkpointer:
        for _ in range(4):
            updates.next(checkpointer)
    assert ckptctl("cp", WEIGHTS, "--store", str(folder), "--to", str(other)).code == 0
    copied = published(other)[-1]
    assert (copied.referenced_bytes, needed(other, copied)) == (0, [])
    assert equal(read(other, copied), updates.published[3])
    file = tmp_path / "model.safetensors"
    assert ckptctl("export", f"{WEIGHTS}@2", "--to", str(file), "--store", str(folder)).code == 0
    exported = safetensors.torch.load_file(file)
    expected = updates.published[2]
    assert all(torch.equal(exported[name], expected[f"model/{name.removeprefix('model/')}"]) for name in exported)
    assert len(exported) >= len(expected) - 1, "a tied weight may be there once"


def test_a_follower_gets_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_STORE", str(tmp_path))
    updates, reader = Updates(), Model()
    with publishing(tmp_path) as checkpointer:
        updates.next(checkpointer).result()
        for weights in islice(ckpt.follow(WEIGHTS), 4):
            weights.load_into(reader)
            expected = updates.published[weights.checkpoint.step]
            state = reader.state_dict().items()
            assert all(torch.equal(tensor, expected[f"model/{name}"].to(tensor.dtype)) for name, tensor in state)
            updates.next(checkpointer).result()


class Mixed(nn.Module):
    """Weights of every type that is trained, and a part that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in (("first", torch.float32), ("second", torch.float16), ("third", torch.bfloat16)):
            self.register_parameter(name, nn.Parameter((torch.randn(90, 400) * 0.02).to(dtype), requires_grad=False))
        self.frozen = nn.Parameter(torch.randn(300, 90), requires_grad=False)

    def update(self, rng: random.Random) -> Tensors:
        """Change some elements of some tensors. Returns the tensors as they are published."""
        torch.manual_seed(rng.randrange(1 << 30))
        for name, tensor in self.named_parameters():
            share = rng.choice([0.0, 0.001, 0.01, 0.1, 1.0]) if name != "frozen" else 0.0
            changed = torch.rand(tensor.shape) < share
            tensor.mul_(torch.where(changed, 1 + torch.randn(tensor.shape) * 0.01, 1.0))
            if rng.random() < 0.2:
                tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([torch.nan, torch.inf, -0.0])
        return {f"model/{name}": rounded(tensor) for name, tensor in self.named_parameters()}


@dataclass
class Life:
    """Published weights, a copy of the store's objects as they were written, and what was damaged or deleted since."""

    folder: Path
    backup: Path
    rng: random.Random
    run: Run
    damaged: set[int] = field(default_factory=set)
    """Steps whose shard has other bytes, until it is healed."""
    done: dict[str, int] = field(default_factory=dict)
    """How often each thing happened."""
    seen: dict[Attempt, object] = field(default_factory=dict)
    """What each checkpoint and the files that it needs looked like when it was read last."""

    def count(self, what: str, number: int = 1) -> None:
        self.done[what] = self.done.get(what, 0) + number

    def back_up(self, checkpoint: Checkpoint) -> None:
        keys = self.run.keys
        shutil.copytree(self.folder / keys.attempt(checkpoint.attempt), self.backup / keys.attempt(checkpoint.attempt))
        (self.backup / keys.outcome(checkpoint.attempt)).parent.mkdir(exist_ok=True)
        shutil.copy(self.folder / keys.outcome(checkpoint.attempt), self.backup / keys.outcome(checkpoint.attempt))

    def flip(self) -> None:
        """In the newest checkpoint, or in one that it needs."""
        listed = published(self.folder)
        steps = {listed[-1].step, *needed(self.folder, listed[-1])}
        victim = self.rng.choice([one for one in listed if one.step in steps])
        key = self.run.keys.shard(victim.attempt, "shard-00000.ckpt")
        path = self.folder / key
        if path.exists():
            flip(path, self.rng.randrange(path.stat().st_size))
            self.damaged.add(victim.step)
            if path.read_bytes() == (self.backup / key).read_bytes():
                self.damaged.remove(victim.step)

    def scrub(self) -> None:
        """Find the damage."""
        found = list(scrub(self.run.store, published(self.folder), "me", system_clock))
        self.count("found", sum(not one.ok for one in found))

    def heal(self) -> None:
        due = due_for_scrub([self.run], damaged=True)
        found = list(scrub(self.run.store, due, "me", system_clock, heal_from=[open_store(str(self.backup))]))
        assert all(one.ok for one in found), [one.problems for one in found]
        self.count("healed", sum(len(one.healed) for one in found))
        self.damaged.clear()

    def prune(self) -> None:
        plan = plan_prune(self.run, Policy(keep_last=self.rng.randint(1, 3)))
        held = apply_prune(self.run, plan, grace_s=self.rng.choice([0.0, 3600.0, 3600.0]))
        self.count("pruned", len(plan.remove) - len(held))

    def undelete(self) -> None:
        for hidden in list_hidden(self.run):
            with suppress(SweepBegun):  # its data is gone
                undelete(self.run, hidden.attempt)
                self.count("undeleted")

    def sweep(self) -> None:
        attempts = self.folder / self.run.keys.attempts
        before = {path.name for path in attempts.iterdir()}
        later = self.rng.choice([SWEEP_GRACE_S, TOMBSTONE_KEPT_S]) + 60  # after which even tombstones go
        collect(Run(self.run.store, WEIGHTS, MovableClock(later), by="me"))
        gone = before - {path.name for path in attempts.iterdir()}
        self.count("swept", len(gone))
        for name in gone:  # healing looks for a shard in each copy
            shutil.rmtree(self.backup / self.run.keys.attempts / name)

    def copy(self) -> None:
        """Of the newest, if it can be read."""
        to = self.folder.with_name(f"copy-{self.done.get('copied', 0)}")
        newest = published(self.folder)[-1]
        if not self.damaged & {newest.step, *needed(self.folder, newest)}:
            succeed("cp", newest.id, "--store", self.folder, "--to", to)
            assert equal(read(to, published(to)[0]), read(self.folder, newest))
            shutil.rmtree(to)
            self.count("copied")

    def files(self, step: int) -> list[tuple[str, int, int, int]]:
        """Name, inode, size and time of each file of the attempts at a step."""
        found = (self.folder / self.run.keys.attempts).glob(f"*{step:012d}-*/*")
        return [(path.name, (info := path.stat()).st_ino, info.st_size, info.st_mtime_ns) for path in sorted(found)]

    def check(self, expected: dict[int, Tensors]) -> None:
        """Each one that is listed reads bit-equal, or is refused for damage in what it needs."""
        for checkpoint in published(self.folder):
            steps = {checkpoint.step, *needed(self.folder, checkpoint)}
            hurt, files = self.damaged & steps, [file for step in sorted(steps) for file in self.files(step)]
            if self.seen.get(checkpoint.attempt) == (checkpoint, files):
                continue  # it reads as it did then
            self.seen[checkpoint.attempt] = checkpoint, files
            try:
                assert equal(read(self.folder, checkpoint), expected[checkpoint.step]), checkpoint.id
            except CorruptObject:
                assert hurt, f"{checkpoint.id} is refused without damage"
                self.count("refused")


@torch.no_grad()
def test_a_life_of_published_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal at the follower, whatever happens to what came before; CKPTD_UPDATES: how many updates."""
    folder, rng = tmp_path / "store", random.Random(0)
    monkeypatch.setenv("CKPT_STORE", str(folder))
    life = Life(folder, tmp_path / "backup", rng, Run(open_store(str(folder)), WEIGHTS, by="me"))
    events = [life.flip, life.prune, life.undelete, life.scrub, life.flip, life.heal, life.copy, life.prune, life.sweep]
    expected, model, reader, follower = dict[int, Tensors](), Mixed(), Mixed().bfloat16(), ckpt.follow(WEIGHTS)
    with publishing(folder, max_references=6) as checkpointer:
        for step in range(UPDATES):
            expected[step] = model.update(rng)
            handle = checkpointer.publish(model, step)
            if step % 7 == 6:
                continue
            checkpointer.wait()
            handle.result()
            new = [c for c in published(folder) if not (life.backup / life.run.keys.attempt(c.attempt)).exists()]
            for checkpoint in new:
                life.back_up(checkpoint)
            hurt = life.damaged & {step, *needed(folder, new[-1])}
            try:
                next(follower).load_into(reader)
                state = {f"model/{name}": tensor for name, tensor in reader.state_dict().items()}
                assert equal(state, {name: tensor.bfloat16() for name, tensor in expected[step].items()})
                life.count("followed")
            except CorruptObject:
                assert hurt
                life.count("refused at the follower")
            life.check(expected)  # which puts what is damaged into quarantine
            events[step % len(events)]()
    life.heal()
    life.check(expected)
    happened = {"found", "healed", "pruned", "undeleted", "swept", "copied", "refused", "followed"}
    assert life.done.keys() >= {*happened, "refused at the follower"}
    assert life.done["followed"] > UPDATES / 2


def publish_under_fsdp2(store: str) -> list[bool]:
    """A sharded model is published by its ranks, and read by another number of them."""
    found = []
    with Checkpointer(store, run="gpt", writer="thread") as checkpointer:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 300))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            handle = checkpointer.publish(model, step)
            whole = {n: t.full_tensor() for n, t in model.state_dict().items() if isinstance(t, DTensor)}
            handle.result()
            read = ckpt.load(f"{store}/gpt~weights@{step}")
            found += [torch.equal(read[f"model/{name}"], whole[name].to(torch.bfloat16)) for name in whole]
            if step:
                assert handle.timings.referenced_bytes
    return found


def test_ranks_publish_their_own_parts(tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:publish_under_fsdp2", 2, {"store": str(tmp_path / "store")})
    assert run_scenario(scenario, tmp_path / "scenario") == [[True] * 12] * 2


def test_an_ordinary_save_into_the_run_needs_no_deltas(tmp_path: Path) -> None:
    updates = Updates()
    with publishing(tmp_path) as checkpointer:
        for _ in range(4):
            updates.next(checkpointer).result()
    with Checkpointer(str(tmp_path), run=WEIGHTS, writer="thread") as checkpointer:
        saved = [checkpointer.save(updates.model.bfloat16(), None, step) for step in (4, 5)]
    source = StoreSource(open_store(str(tmp_path)))
    for checkpoint in saved:
        assert verify(source, checkpoint).ok
        assert not any(shard.bases for shard in read_manifest(source, checkpoint).content.shards)
    assert saved[1].referenced_bytes == saved[0].needed_bytes
