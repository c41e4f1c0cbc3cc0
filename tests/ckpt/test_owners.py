"""Who holds a value decides who writes it: whatever only some ranks hold, or hold differently, comes back on its rank.

What would be lost is refused by name, and nothing is committed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer
from ckptstore.errors import CkptError
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.training import same_state


@dataclass
class Held:
    model: nn.Module
    optim: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] | None = None
    assets: Any = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.optim.values()) if isinstance(self.optim, dict) else [self.optim] if self.optim else []

    def step(self, gradient: float = 1.0) -> Held:
        for optim in self.optimizers:
            for parameter in (one for group in optim.param_groups for one in group["params"]):
                parameter.grad = torch.full_like(parameter, gradient)
            optim.step()
        return self

    def see(self, rank: int) -> None:
        """This rank's own statistics, once the ranks have agreed."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module(torch.randn(4, module.num_features) + rank)

    def state(self) -> Any:
        own = {
            name: value.state_dict() if isinstance(value, nn.Module) else value for name, value in self.extras.items()
        }
        model = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }
        return {"model": model, "optim": [one.state_dict()["state"] for one in self.optimizers], **own}


def plain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, 3) for width in widths or (3, 4)))


def adam(model: nn.Module, where: bool = True, lr: float = 0.0) -> Any:
    """By default the parameters stay as they are, equal on all ranks."""
    return torch.optim.AdamW(model.parameters(), lr) if where else None


def of_plain(make: Callable[[nn.Sequential], Any]) -> Held:
    model = plain()
    return Held(model, make(model))


def experts(rank: int) -> Held:
    model = nn.ModuleDict({"all": nn.Linear(2, 2), f"expert{rank}": nn.Linear(2, 2)})
    return Held(model, adam(model))


def buffer_on_one(rank: int) -> Held:
    model = plain()
    if rank:
        model.register_buffer("own", torch.randn(3))
    return Held(model)


class Hooked(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(3)
        self.register_load_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]


def counted(rank: int) -> Held:
    """No statistics, and not equal at the first save."""
    model = plain()
    model.register_buffer("seen", torch.tensor(rank))
    return Held(model)


def ddp_statistics(rank: int) -> Held:
    warnings.simplefilter("ignore")  # a deprecated argument, which other versions lack a name for
    model = DistributedDataParallel(nn.BatchNorm1d(3), broadcast_buffers=False)
    return Held(model)


def average_on_last(rank: int) -> Held:
    held = of_plain(adam)
    return Held(held.model, held.optim, {"average": plain()} if rank else {})


class Scaled(torch.optim.SGD):
    """Keeps a plain tensor beside the parameter: equal on all ranks, or of this rank's shard."""

    shift = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["scale"] = torch.ones(70) + torch.arange(70).eq(69) * self.shift


def sharded(rank: int) -> Held:
    model = plain()
    fully_shard(model)
    return Held(model, Scaled(model.parameters(), 0.0))


RESTORED: dict[str, Callable[[int], Held]] = {
    "optimizer_on_first": lambda rank: of_plain(lambda model: adam(model, rank == 0)),
    "optimizer_on_last": lambda rank: of_plain(lambda model: adam(model, rank == 1)),
    "zero_by_hand": lambda rank: of_plain(lambda model: adam(model[rank])),
    "two_optimizers": lambda rank: of_plain(lambda model: {"ab"[rank]: adam(model[rank])}),
    "experts": experts,
    "buffer_on_one": buffer_on_one,
    "statistics": lambda rank: Held(nn.BatchNorm1d(3)),
    "counted": counted,
    "hooked_statistics": lambda rank: Held(Hooked()),
    "large_statistics": lambda rank: Held(nn.BatchNorm1d(20_000)),
    "ddp_statistics": ddp_statistics,
    "extra_on_one": lambda rank: Held(plain(), extras={"note": torch.randn(3)} if rank else {}),
    "average_on_last": average_on_last,
    "generators": lambda rank: Held(
        plain(), extras={"generator": torch.Generator().manual_seed(torch.initial_seed() + rank).get_state()}
    ),
    "sharded": sharded,
}


def ignored_by_ddp(rank: int) -> Held:
    model = plain()
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    nn.init.constant_(next(model.parameters()), rank)
    return Held(DistributedDataParallel(model))


def groups_of_ddp(rank: int) -> Held:
    """Each rank is a replica of another model."""
    alone = [dist.new_group([one]) for one in range(2)]
    model = plain()
    nn.init.constant_(next(model.parameters()), rank)
    return Held(DistributedDataParallel(model, process_group=alone[rank]))


def stepped_on_last(rank: int) -> Held:
    model = plain()
    held = Held(model, adam(model))
    return held.step() if rank else held


def stepped_on_last_of_some(rank: int) -> Held:
    model = plain(3, 4, 5)
    held = Held(model, adam(model[rank : rank + 2]))
    return held.step() if rank else held


def state_of_a_shard(rank: int) -> Held:
    held = sharded(rank)
    held.optim.shift = rank
    return held.step()


def shared_on_last(rank: int) -> Held:
    return Held(plain(), shared={"vocabulary": torch.arange(3)} if rank else None)


def assets_on_last(rank: int) -> Held:
    return Held(plain(), assets={"config.json": b"{}"} if rank else None)


REFUSED = {
    ignored_by_ddp: "ranks 0 and 1 hold different tensors under the name 'model/0.weight': other values",
    groups_of_ddp: "ranks 0 and 1 hold different tensors under the name 'model/0.weight': other values",
    stepped_on_last: "state of 0 of 4 parameters",
    stepped_on_last_of_some: "'optim/state/1.bias': state of 0 of 2 parameters",
    state_of_a_shard: "hold different 'optim/state/0.weight/scale'",
    shared_on_last: "different 'shared=':  and vocabulary",
    assets_on_last: "different 'shared=':  and assets",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("owners")
    (folder / "run").mkdir()
    [outcome] = run_scenarios([Scenario(f"{__name__}:ranks", 2, {"folder": str(folder)}, 300.0)], folder / "run")
    return outcome


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", RESTORED)
def test_each_rank_gets_back_what_it_held(found: Outcome, kind: str, split: bool) -> None:
    assert [result[f"{kind} {split}"] for result in found.result()] == ["same", "same"]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_would_be_lost_is_refused_by_name(found: Outcome, kind: Any) -> None:
    first, second = (result[kind.__name__] for result in found.result())
    assert first.startswith("unsupported_object: ")
    assert REFUSED[kind] in first
    assert second.startswith(("unsupported_object: ", "rank_failed: "))
    assert REFUSED[kind] in second


def test_replicas_that_drift_apart_later_are_named(found: Outcome) -> None:
    first, second = (result["drift"] for result in found.result())
    assert second == []
    for said, name in zip(first, ("", "optim/state/"), strict=True):
        assert f"ranks 0 and 1 hold different '{name}" in said


def test_another_number_of_ranks_is_told_whose_buffers_it_gets(
    found: Outcome, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.BatchNorm1d(3)
    with Checkpointer(found.result()[0]["statistics"], run="r", writer="thread") as checkpointer:
        checkpointer.restore(model)
    assert "each rank had its own model/num_batches_tracked, model/running_mean" in caplog.text
    assert model.running_mean is not None
    assert model.running_mean.tolist() == found.result()[0]["mean"]


def ranks(folder: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    rank = dist.get_rank()
    for kind, make in RESTORED.items():
        for split in (False, True):
            with Checkpointer(
                f"{folder}/{kind}{split}", run="r", writer="thread", split_replicas=split
            ) as checkpointer:
                torch.manual_seed(1)
                held = make(rank).step()
                checkpointer.prepare(held.model, held.optim, **held.extras)
                held.see(rank)
                checkpointer.save(held.model, held.optim, 1, **held.extras)
                torch.manual_seed(2)
                other = make(rank)
                restored = checkpointer.restore(other.model, other.optim, **other.extras)
                assert restored is not None
                other.extras |= restored.values
            said[f"{kind} {split}"] = "same" if same_state(other.state(), held.state()) else "other"
            if kind == "statistics":
                said |= {
                    "statistics": f"{folder}/{kind}{split}",
                    "mean": held.state()["model"]["running_mean"].tolist(),
                }
    for refused in REFUSED:
        torch.manual_seed(1)
        said[refused.__name__] = refusal(f"{folder}/{refused.__name__}", refused(rank))
    return said | {"drift": drift(folder)}


def refusal(store: str, held: Held) -> str:
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        try:
            checkpointer.save(held.model, held.optim, 1, shared=held.shared, assets=held.assets)
        except CkptError as error:
            assert checkpointer.restore(held.model) is None, "nothing was committed"
            return f"{error.code}: {error.message}"
    return "saved"


def drift(folder: str) -> list[str]:
    """Local steps after a first save, under DDP; and momentum that differs beside averaged weights."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    for averaged in (False, True):
        torch.manual_seed(1)
        model = DistributedDataParallel(plain())
        held = Held(model, adam(model, lr=0.1))
        with Checkpointer(f"{folder}/drift{averaged}", run="r", writer="thread") as checkpointer:
            for step in range(4):
                checkpointer.save(held.model, held.optim, step)
                held.step(1.0 + dist.get_rank())
                for parameter in model.parameters():
                    dist.broadcast(parameter.data, 0) if averaged else None
    logging.getLogger("ckpt").removeHandler(handler)
    return [one for one in records if "drifted apart" in one]
