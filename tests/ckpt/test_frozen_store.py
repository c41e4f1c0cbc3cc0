"""A store that an earlier version wrote is read as it was meant: restored bit for bit, with all that operators added.

tests/data/format-1-training is never written again (`state` says what is in it).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckpt import Checkpointer
from ckptstore.format.planning import derived_bytes
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.support.command_line import invoke, succeed
from tests.support.training import same_state
from tests.support.waiting import present

DATA = Path(__file__).parents[1] / "data" / "format-1-training"
RUN, OTHER_RUN = "training", "other"
_FROZEN, _TRAINED = (48, 64), (16, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy: readers write leases."""
    return Path(shutil.copytree(DATA, tmp_path / "store"))


def query(folder: Path, *command: object) -> Any:
    return succeed(*command, "--store", folder, "-o", "json").json


def restored(folder: Path, run: str, step: int) -> tuple[Any, ...]:
    """Model, optimizer and extras from a checkpoint."""
    net, optim, extras = state(0)
    with torch.random.fork_rng(), Checkpointer(str(folder), run=run, writer="thread") as checkpointer:
        assert present(checkpointer.restore(net, optim if run == RUN else None, checkpoint=step, **extras)).step == step
    return net, optim, extras


@pytest.mark.parametrize(("run", "step"), [(RUN, 1), (RUN, 2), (OTHER_RUN, 7)])
def test_every_checkpoint_is_restored_bit_for_bit(folder: Path, run: str, step: int) -> None:
    net, optim, extras = restored(folder, run, step)
    saved_net, saved_optim, saved_extras = state(step)
    assert net.tied is net.trained
    assert same_state(net.state_dict(), saved_net.state_dict())
    assert extras["data"].value == saved_extras["data"].value
    if run == RUN:
        found, saved = optim.state_dict(), saved_optim.state_dict()
        assert same_state(found["state"], saved["state"])
        assert found["param_groups"][0]["lr"] == saved["param_groups"][0]["lr"]


def test_the_second_checkpoint_references_the_first_and_stores_no_cast(folder: Path) -> None:
    newest, oldest = query(folder, "ls", RUN)
    assert (oldest["referenced_bytes"], newest["referenced_bytes"] > 0) == (0, True)
    assert newest["stored_bytes"] < oldest["stored_bytes"] < oldest["raw_bytes"]
    assert query(folder, "verify", "*")
    source = StoreSource(open_store(str(folder)))
    assert derived_bytes(read_manifest(source, source.latest(RUN)).content) == {"model/cast": 2 * 16 * 32}
    assert invoke("rm", f"{RUN}@1", "--yes", "--store", folder).code == 6, "referenced"


def test_labels_pins_policies_and_the_audit_log_are_listed(folder: Path) -> None:
    ls = {item["step"]: item for item in query(folder, "ls", RUN)}
    assert ls.keys() == {1, 2}
    assert ls[1]["metrics"] == {"loss": 1.0}
    assert ls[1]["tags"] == {}
    assert (ls[2]["metrics"], ls[2]["tags"]) == ({"loss": 0.25, "accuracy": 0.5}, {"kind": "best"})
    assert query(folder, "pin", RUN) == [{"id": ls[2]["id"], "name": "paper"}]
    found = query(folder, "policy", "show")
    assert (found["version"], found["by"], found["reason"]) == (2, "operator@example", "second")
    policies = found["policies"]
    assert (policies["default"]["keep_last"], policies["default"]["keep_best"]) == (2, ["loss:min:1"])
    assert [(item["runs"], item["rules"] is None) for item in policies["overrides"]] == [
        ("other*", True),
        ("train*", False),
    ]
    assert (policies["overrides"][1]["rules"]["keep_every"], policies["grace_s"]) == (100, 3600.0)
    assert [record["action"] for record in query(folder, "audit", RUN)] == ["delete", "pin", "label", "label"]


def test_a_deletion_is_listed_and_taken_back(folder: Path) -> None:
    (deleted,) = query(folder, "undelete", RUN)
    assert (deleted["id"].partition(".")[0], deleted["by"]) == (f"{RUN}@3", "operator@example")
    assert (deleted["reason"], invoke("show", f"{RUN}@3", "--store", folder).code) == ("diverged", 4)
    assert invoke("undelete", f"{RUN}@3", "--store", folder).code == 0
    assert same_state(restored(folder, RUN, 3)[0].state_dict(), state(3)[0].state_dict())


class Net(nn.Module):
    """A frozen weight, a trained one under two names, and a copy of it in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(_FROZEN, dtype=torch.float16), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(_TRAINED))
        self.tied = self.trained
        self.register_buffer("cast", torch.zeros(_TRAINED, dtype=torch.bfloat16))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) with 24 bits, by integer arithmetic only."""
    index = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    mixed = (index * np.uint64(2_654_435_761) + np.uint64(seed * 40_503 + 1)) * np.uint64(6_364_136_223_846_793_005)
    bits = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return torch.from_numpy(bits.reshape(shape))


def state(step: int) -> tuple[Any, torch.optim.Adam, dict[str, Any]]:
    """Model, optimizer and extras as they were saved at a step; 0: as before the first step."""
    net: Any = Net()
    optim = torch.optim.Adam([net.trained], lr=0.001 * (step + 1))
    extras: dict[str, Any] = {"data": Position()}
    if step:
        net.trained.grad = torch.zeros(_TRAINED)
        optim.step()
        moments = optim.state[net.trained]
        with torch.no_grad():
            net.frozen.copy_(numbers(1, _FROZEN))
            net.trained.copy_(numbers(10 * step, _TRAINED))
            net.cast.copy_(net.trained)
            net.counter.fill_(step)
            for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
                moments[name].copy_(numbers(10 * step + number, _TRAINED))
            moments["step"].fill_(float(step))
        extras["data"].value = {"epoch": step, "seen": [1 << 70, float("inf")], "key": b"\0\xff", "pair": (step, None)}
    return net, optim, extras


class Position:
    def __init__(self) -> None:
        self.value: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state
