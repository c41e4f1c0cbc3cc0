from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.dcp import StorageReader
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import advance, undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.dcp_state import dcp, flat_optimizer_state, make_model, make_optimizer, same
from tests.ckpt.ddp import lines, run_ranks
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that two ranks have saved to and loaded from, and what a Checkpointer had saved there."""
    place = tmp_path_factory.mktemp("dcp")
    for name in ("meet", "store"):
        (place / name).mkdir()
    model = make_model(1)
    with Checkpointer(str(place / "store"), run="single", writer="thread") as checkpointer:
        checkpointer.save(model, make_optimizer(model), 7)
    for output in run_ranks("tests.ckpt.dcp.dcp_ranks", 2, place / "meet", str(place / "store")):
        assert len([line for line in lines(output) if line.endswith(" held")]) == 7, output
    return str(place / "store")


def test_two_ranks_write_the_checkpoint_that_one_process_would(ranks: str) -> None:
    source = StoreSource(open_store(ranks))
    checkpoint = source.find(Reference("fsdp", 1))
    assert (checkpoint.world_size, checkpoint.num_shards) == (2, 2)
    assert verify(source, checkpoint).ok
    content = read_manifest(source, checkpoint).content
    shapes = dict(zip(content.entries.name, content.entries.shape, strict=True))
    assert (shapes["model/0.weight"], shapes["optim/state.2.weight.exp_avg"]) == ([301, 7], [1, 301])
    assert content.trees["model"]["0.weight"] == {"$": "tensor", "name": "model/0.weight"}
    assert content.trees["objects"] == {
        "seen": 17, "only_0": {"$": "bytes", "v": "Ynl0ZXM="}, "only_1": {"$": "bytes", "v": "Ynl0ZXM="},
        "groups": [{"lr": 0.1}, {"lr": 0.2}], "order": [3, 1, 2],
    }  # fmt: skip


@pytest.mark.parametrize("through", ["store", "daemon"])
def test_one_process_loads_what_two_ranks_saved(ranks: str, through: str) -> None:
    expected, model = make_model(1), make_model(2)
    optim, its_optim = make_optimizer(model), make_optimizer(expected)
    state = {"model": model.state_dict(), "optim": flat_optimizer_state(model, optim)}
    with running_daemon(ranks) if through == "daemon" else nullcontext() as daemon:
        dcp.load(state, storage_reader=StorageReader(daemon.url if daemon else ranks, run="fsdp", checkpoint=2))
    assert same(state["model"], dict(expected.state_dict()))
    assert same(state["optim"], flat_optimizer_state(expected, its_optim))


def test_checkpointer_restores_the_model_that_two_ranks_saved(ranks: str) -> None:
    expected, model = make_model(1), make_model(2)
    make_optimizer(expected)
    with Checkpointer(ranks, run="fsdp", writer="thread") as checkpointer:
        tensors = checkpointer.load(1, "model/*")
        checkpointer.restore(model)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert same(tensors, {f"model/{name}": tensor for name, tensor in expected.state_dict().items()})


def test_ckptctl_shows_verifies_and_exports_it(ranks: str, tmp_path: Path) -> None:
    expected = make_model(1)
    make_optimizer(expected)
    assert [row["step"] for row in invoke("ls", "fsdp", "--store", ranks, "-o", "json").json] == [3, 2, 1]
    assert "model/0.weight" in invoke("show", "fsdp@1", "--store", ranks, "-o", "json").stdout
    assert invoke("verify", "fsdp@1", "--store", ranks).code == 0
    done = invoke("export", "fsdp@1", "--to", tmp_path / "all.pt", "--store", ranks)
    assert done.code == 0, done.stderr
    exported = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(exported["model"], dict(expected.state_dict()))
    assert exported["objects"]["groups"] == [{"lr": 0.1}, {"lr": 0.2}]


def test_a_failed_save_is_never_committed(ranks: str) -> None:
    store = open_store(ranks)
    run = Run(store, "failing")
    assert StoreSource(store).checkpoints("failing") == []
    attempts = undecided_attempts(run)
    assert len(attempts) == 3
    assert not any(advance(run, attempt) for attempt in attempts)


def test_a_rank_that_is_killed_leaves_nothing_committed(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    with pytest.raises(AssertionError, match="rank 0 failed"):
        run_ranks("tests.ckpt.dcp.dcp_ranks", 2, tmp_path / "meet", str(tmp_path / "store"), "die")
    store = open_store(str(tmp_path / "store"))
    run = Run(store, "killed")
    assert StoreSource(store).checkpoints("killed") == []
    assert not any(advance(run, attempt) for attempt in undecided_attempts(run))
