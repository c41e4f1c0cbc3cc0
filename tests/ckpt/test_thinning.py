"""Thinning: older checkpoints lose their optimizer state and keep their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.errors import NoCheckpoint, SweepBegun, Thinned
from ckptstore.format.records import Policy, PolicySet
from ckptstore.names import Reference, is_optimizer_shard
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import list_deleted, sweep
from ckptstore.retention.pruning import Prune
from ckptstore.retention.scrubbing import scrub
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.tiers.copying import copy_checkpoint

KEEP = Policy(keep_full=2, keep_weights="all")


def ruled(url: str) -> Store:
    """A store with a policy that thins: saves of its runs are divided."""
    store = open_store(url)
    StoreOperator(store).change_policies(PolicySet(default=KEEP), 0)
    return store


class Trained:
    """A model of 1.2 MB and its optimizer, saved after each step into a folder of its own."""

    def __init__(self, path: Path, *, policy: bool = True) -> None:
        self.url = f"file://{path}"
        self.store = ruled(self.url) if policy else open_store(self.url)
        self.operator = StoreOperator(self.store)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.model, self.optim = build()
        with Checkpointer(self.url, run="gpt", writer="thread", statistics=False) as checkpointer:
            for step in range(5):
                self.model(torch.ones(1, 560)).sum().backward()
                self.optim.step()
                self.weights[step] = {name: value.clone() for name, value in self.model.state_dict().items()}
                checkpointer.save(self.model, self.optim, step)

    def listed(self) -> dict[int, Checkpoint]:
        return {c.step: c for c in list_checkpoints(Run(self.store, "gpt"))}

    def data_bytes(self) -> int:
        return sum(info.bytes for info in self.store.list("gpt/attempts/") if info.key.endswith(".ckpt"))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(560, 560)
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path / "store")


def test_predicted_bytes_are_freed_and_weights_stay(trained: Trained) -> None:
    before, wanted = trained.data_bytes(), Prune(KEEP, "gpt", 0.0)
    plan = trained.operator.plan_prune(wanted)
    assert [c.step for c in plan.thin] == [2, 1, 0]
    assert plan.remove == []
    assert plan.freed_bytes > before * 0.3
    trained.operator.prune(wanted, plan)
    assert before - trained.data_bytes() == plan.freed_bytes
    listed = trained.listed()
    states = {step: c.state for step, c in listed.items()}
    assert states == {4: "committed", 3: "committed", 2: "thinned", 1: "thinned", 0: "thinned"}
    assert sum(c.stored_bytes for c in listed.values()) == trained.data_bytes()
    for step, checkpoint in listed.items():
        assert verify(StoreSource(trained.store), checkpoint).ok
        model, _ = build()
        with Checkpointer(trained.url, run="gpt", writer="thread") as checkpointer:
            checkpointer.restore(model, checkpoint=step)
        assert all(torch.equal(value, trained.weights[step][name]) for name, value in model.state_dict().items())
    assert trained.operator.plan_prune(wanted).thin == [], "once"


def test_without_a_policy_that_thins_a_rank_writes_one_file(tmp_path: Path) -> None:
    plain = Trained(tmp_path / "store", policy=False)
    data = [info.key for info in plain.store.list("gpt/attempts/") if info.key.endswith(".ckpt")]
    assert [key.rpartition("/")[2] for key in data] == ["shard-00000.ckpt"] * 5
    plan = plain.operator.plan_prune(Prune(KEEP, "gpt", 0.0))
    assert (plan.thin, plan.remove, plan.freed_bytes) == ([], [], 0)


def thin(trained: Trained, grace_s: float = 0.0) -> None:
    trained.operator.prune(Prune(KEEP, "gpt", grace_s))


def test_an_exact_resume_is_refused_and_names_the_nearest_full_one(trained: Trained) -> None:
    thin(trained)
    model, optim = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    full = trained.listed()[3]
    with Checkpointer(trained.url, run="gpt", writer="thread") as checkpointer:
        with pytest.raises(Thinned, match=full.id):
            checkpointer.restore(model, optim, checkpoint=1)
        with checkpointer.restore_in_stages(checkpoint=1) as stages:
            stages.model(model)
            with pytest.raises(Thinned, match=full.id):
                stages.optimizers(optim)
        restored = checkpointer.restore(*build())
        assert restored is not None
        assert restored.step == 4
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the stage"


def test_latest_is_never_a_thinned_one(trained: Trained) -> None:
    thin(trained)
    listed = trained.listed()
    for step in (4, 3):
        assert StoreSource(trained.store).latest("gpt").step == step
        trained.operator.delete(listed[step], 0.0, force=True)
    source = StoreSource(trained.store)
    with pytest.raises(NoCheckpoint):
        source.latest("gpt")
    assert list(source.candidates("gpt")) == []
    with Checkpointer(trained.url, run="gpt", writer="thread") as checkpointer, pytest.raises(Thinned, match="thinned"):
        checkpointer.restore(*build())
    assert source.find(Reference("gpt", 1)).thinned


def test_it_is_undone_within_the_grace(trained: Trained) -> None:
    before = trained.data_bytes()
    thin(trained, grace_s=3600.0)
    assert trained.data_bytes() == before
    assert trained.listed()[2].state is State.THINNED
    run = Run(trained.store, "gpt")
    assert [found.reason for found in list_deleted(run)] == ["thinned: prune"] * 3
    back = trained.operator.undelete(Reference("gpt", 2))
    assert back.state is State.COMMITTED
    thin(trained)
    listed = trained.listed()
    assert [step for step, c in listed.items() if c.thinned] == [1, 0], "the pin"
    with Checkpointer(trained.url, run="other", writer="thread") as checkpointer:
        assert checkpointer.restore(*build(), checkpoint=back.id) is not None
    sweep(run, [listed[1].attempt])
    with pytest.raises((SweepBegun, NoCheckpoint)):
        trained.operator.undelete(Reference("gpt", 1))
    assert verify(StoreSource(trained.store), listed[2]).ok


def test_pins_and_leases_hold_optimizer_state(trained: Trained) -> None:
    listed, source = trained.listed(), StoreSource(trained.store)
    trained.operator.pin(listed[2], "paper")
    lease = source.take_lease(listed[1], "reader", 3600.0)
    thin(trained)
    assert [step for step, c in trained.listed().items() if c.thinned] == [0]
    trained.operator.unpin(listed[2], "paper")
    source.release_lease("gpt", lease)
    thin(trained, grace_s=3600.0)
    with pytest.raises(NoCheckpoint, match="thinned"):
        source.take_lease(listed[1], "reader", 3600.0)
    with pytest.raises(NoCheckpoint, match="thinned"):
        trained.operator.pin(listed[1], "paper")
    source.release_lease("gpt", source.take_lease(trained.listed()[1], "reader", 3600.0))


def test_a_scrub_that_began_before_finds_no_damage(trained: Trained) -> None:
    before = trained.listed()
    thin(trained)
    after = trained.listed()
    for listed, found in ((before, [4, 3]), (after, [4, 3, 2, 1, 0])):
        results = list(scrub(trained.store, listed.values(), "me", lambda: 0.0))
        assert [result.checkpoint.step for result in results] == found
        assert all(result.ok for result in results)
    assert not any(c.state is State.CORRUPT for c in trained.listed().values())


def test_a_copy_of_a_thinned_one_is_thinned(trained: Trained, tmp_path: Path) -> None:
    thin(trained)
    other = open_store(f"file://{tmp_path}/other")
    original = trained.listed()[1]
    copied = copy_checkpoint(StoreSource(trained.store), original, Run(other, "gpt"), lambda _: None)
    assert copied.checkpoint.thinned
    assert copied.checkpoint.stored_bytes == original.stored_bytes
    [found] = list_checkpoints(Run(other, "gpt"))
    assert found.state is State.THINNED
    assert verify(StoreSource(other), found).ok
    assert not [info.key for info in other.list("") if is_optimizer_shard(info.key)]


def test_references_to_weights_do_not_hold_optimizer_state(tmp_path: Path) -> None:
    """A frozen tower is stored once, by a checkpoint that is thinned all the same."""
    url = f"file://{tmp_path}"
    store = ruled(url)
    tower, head = nn.Linear(600, 600), nn.Linear(600, 600)
    tower.requires_grad_(False)
    model, optim = nn.Sequential(tower, head), torch.optim.AdamW(head.parameters())
    with Checkpointer(url, run="gpt", writer="thread") as checkpointer:
        for step in range(4):
            model(torch.ones(1, 600)).sum().backward()
            optim.step()
            checkpointer.save(model, optim, step)
    assert [c.referenced_bytes > 0 for c in list_checkpoints(Run(store, "gpt"))] == [True, True, True, False]
    StoreOperator(store).prune(Prune(Policy(keep_full=1, keep_weights="all"), "gpt", 0.0))
    listed = list_checkpoints(Run(store, "gpt"))
    assert [c.thinned for c in listed] == [False, True, True, True]
    for checkpoint in listed:
        assert verify(StoreSource(store), checkpoint).ok


def test_references_to_optimizer_state_hold_it(tmp_path: Path) -> None:
    """What is saved again unchanged is referenced, moments included."""
    url = f"file://{tmp_path}"
    store = ruled(url)
    model, optim = build()
    model(torch.ones(1, 560)).sum().backward()
    optim.step()
    with Checkpointer(url, run="gpt", writer="thread") as checkpointer:
        for step in range(3):
            checkpointer.save(model, optim, step)
    run = Run(store, "gpt")
    wanted = Prune(Policy(keep_full=1, keep_weights="all"), "gpt", 0.0)
    StoreOperator(store).prune(wanted)
    newest, middle, oldest = list_checkpoints(run)
    assert (newest.thinned, middle.thinned, oldest.thinned) == (False, False, False), "middle has none of its own"
    assert any(r.startswith("optimizer:") for d in StoreOperator(store).plan_prune(wanted).keep for r in d.reasons)
    with Checkpointer(url, run="gpt", writer="thread", max_references=0) as checkpointer:
        checkpointer.restore(model, optim)
        checkpointer.save(model, optim, 3)
    for c in (newest, middle):
        StoreOperator(store).delete(c, 0.0)
    StoreOperator(store).prune(wanted)
    assert [c.thinned for c in list_checkpoints(run)] == [False, True]
