"""When and where a run of two FSDP2 ranks went wrong, as ckptctl finds it, on a store and on a daemon."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import Checkpointer
from ckpt.saver.messages import Report, SaveJob, Setup, Warned
from ckpt.saver.pipeline import SavePipeline
from ckptapi.client import DaemonClient
from ckptstore.analysis.difference import Side, compare
from ckptstore.clock import system_clock
from ckptstore.format.shards import Placed, Slice
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.saver.attempts import new_attempt
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.parallel.model import Part, Shape, Transformer
from tests.support.parallel.runner import Scenario, run_scenarios
from tests.support.stores import CountingStore
from tests.support.training import seed_all
from tests.support.waiting import wait_until

RUNS = ("nan", "moment", "layer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forensics")
    store = folder / "store"
    scenarios = [Scenario(f"{__name__}:go_wrong", 2, {"store": str(store), "how": how}) for how in RUNS]
    for outcome in run_scenarios(scenarios, folder / "ranks"):
        assert outcome.result()[0]["name"].endswith("1.mlp.up.weight")
    return store


def why(folder: Path, run: str) -> Any:
    return invoke("why", run, "--store", folder, "-o", "json").json


def test_why_names_the_step_and_the_tensor_of_the_first_nan(folder: Path) -> None:
    found = why(folder, "nan")
    assert (found["step"], found["num_tensors"]) == (WRONG_AT, 1)
    (tensor,) = found["tensors"]
    assert tensor["tensor"].endswith("1.mlp.up.weight")
    assert tensor["tensor"].startswith("model/")
    assert (tensor["cause"], tensor["found"]["nan"], tensor["found"]["positive_inf"]) == ("not_finite", 1, 0)
    assert (tensor["before"]["nan"], tensor["after"]["nan"]) == (0, 0)
    assert [found["before"].split(".")[0], found["after"].split(".")[0]] == ["nan@30", "nan@50"]
    shown = invoke("why", "nan", "--store", folder).stdout
    assert f"nan@{WRONG_AT}." in shown
    assert "1 NaN and 0 Inf of 4,096" in shown


def test_why_names_a_second_moment_that_blew_up(folder: Path) -> None:
    found = why(folder, "moment")
    assert found["step"] == WRONG_AT
    tensor = found["tensors"][0]
    assert "exp_avg_sq" in tensor["tensor"]
    assert "1.mlp.up.weight" in tensor["tensor"]
    assert (tensor["cause"], tensor["found"]["maximum"]) == ("left_range", pytest.approx(1e12))
    assert tensor["before"]["maximum"] < 1


def test_why_finds_nothing_in_a_healthy_run(folder: Path) -> None:
    assert why(folder, "layer")["checkpoint"] is None
    assert "Nothing is wrong" in invoke("why", "layer", "--store", folder).stdout
    assert invoke("why", "typo", "--store", folder).code != 0


def test_stats_of_a_checkpoint_and_over_the_steps(folder: Path) -> None:
    one = invoke("stats", "nan@40", "--store", folder, "-o", "json", "--names", "*1.mlp.up.weight").json
    assert [tensor["nan"] for tensor in one["tensors"] if tensor["name"].startswith("model/")] == [1]
    curves = invoke("stats", "nan", "--store", folder, "-o", "json", "--names", "model/*").json
    assert [body["step"] for body in curves] == list(STEPS)
    assert "STEP" in succeed("stats", "nan", "--store", folder, "--names", "*1.mlp.up.weight").stdout
    assert "LARGEST" in invoke("stats", "nan", "--store", folder).stdout
    assert invoke("stats", "nan@40", "--store", folder, "--names", "typo").code != 0


def test_diff_of_two_checkpoints_with_one_changed_layer_reads_only_that(folder: Path) -> None:
    store = CountingStore(open_store(str(folder)))
    source = StoreSource(store)
    old, new = (Side.open(source, source.find(Reference.parse(f"layer@{step}"))) for step in STEPS[-2:])
    store.reads.clear()
    result = compare(old, new)
    (changed,) = result.changed
    assert changed.name.startswith("model/")
    assert changed.name.endswith("1.mlp.up.weight")
    assert changed.largest == pytest.approx(0.5, abs=1e-6)
    assert changed.changed == 4096
    differing = chunk_bytes(old, new) + chunk_bytes(new, old)
    assert 0 < differing < store.read_bytes * 1.0001
    assert store.read_bytes <= 1.05 * differing
    assert store.read_bytes == result.read_bytes


def chunk_bytes(side: Side, other: Side) -> int:
    """Stored bytes of the chunks of a checkpoint that the other one has not."""
    theirs = {shard.chunks.digest_of(n) for shard in other.content.shards for n in range(len(shard.chunks.raw))}
    chunks = [(shard.chunks, n) for shard in side.content.shards for n in range(len(shard.chunks.raw))]
    return sum(int(chunks.stored[n]) for chunks, n in chunks if chunks.digest_of(n) not in theirs)


def test_a_daemon_answers_as_the_store_does(folder: Path) -> None:
    with running_daemon(folder.as_uri()) as daemon:
        for args in (
            ("why", "nan"), ("why", "moment"), ("stats", "nan@40"), ("stats", "nan"),
            ("diff", "layer@40", "layer@50"), ("diff", "nan@10", "moment@50"),
        ):  # fmt: skip
            direct = invoke(*args, "--store", folder, "-o", "json")
            through = invoke(*args, "--url", daemon.url, "-o", "json")
            assert (through.code, through.json) == (direct.code, direct.json), (args, through.stderr)


def test_the_code_and_the_values_of_a_run_are_shown_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.config.HEARTBEAT_S", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("lr = 0.1")
    for command in ("init -q", "add train.py", "-c user.name=ada -c user.email=ada@localhost commit -qm first"):
        subprocess.run(["git", *command.split()], check=True, timeout=60)
    (tmp_path / "train.py").write_text("lr = 0.2")
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path / "store"), run="r") as checkpointer:
        for step in (1, 2):
            checkpointer.save(model, optim, step, config={"data": "books", "layers": [2, 2], "seed": [16**4000]})
            optim.param_groups[0]["lr"] = 0.01
    diff = ("diff", "r@1", "r@2", "--store", tmp_path / "store")
    assert invoke(*diff, "-o", "json").json["values"] == {"optim/groups/0/lr": ["0.1", "0.01"]}
    assert "optim/groups/0/lr  0.1     0.01" in succeed(*diff).stdout
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=60).stdout[:12]
    with running_daemon((tmp_path / "store").as_uri()) as daemon:
        assert f"· {commit}-dirty" in daemon.get("/runs/r").text
        page = daemon.get("/checkpoints/r@2").text
        shown = {
            "config/data": "books", "config/layers": "[2, 2]", "config/seed": "[&#39;0x1000",
            "optim/groups/0/lr": "0.01",
        }  # fmt: skip
        for name, value in shown.items():
            assert re.search(rf">{name}</th><td[^>]*><div[^>]*>{re.escape(value)}", page), name


def test_retention_can_keep_the_newest_healthy_checkpoint(folder: Path) -> None:
    listed = invoke("ls", "nan", "--store", folder, "-o", "json").json
    assert {body["step"]: body["not_finite"] for body in listed} == {10: 0, 20: 0, 30: 0, 40: 1, 50: 0}
    plan = invoke("prune", "nan", "--keep-healthy", 1, "--dry-run", "--store", folder)
    assert "healthy-1" in next(line for line in plan.stdout.splitlines() if "nan@50" in line)
    with running_daemon(folder.as_uri()) as daemon:
        assert invoke("ls", "nan", "--url", daemon.url, "-o", "json").json == listed
        planned = invoke("prune", "nan", "--keep-healthy", 1, "--dry-run", "--url", daemon.url)
        assert "healthy-1" in planned.stdout
        assert invoke("policy", "set", "--keep", 1, "--keep-healthy", 1, "--url", daemon.url).code == 0
        assert "keep_healthy: 1" in invoke("policy", "show", "--store", folder).stdout


def test_the_first_nan_is_logged_and_an_event(tmp_path: Path) -> None:
    store, numbers = open_store(str(tmp_path / "store")), np.ones(1000, np.float32)
    reports: list[Report] = []
    with running_daemon((tmp_path / "store").as_uri()) as daemon:
        setup = Setup(
            store=store.url, options={}, run="r", rank=0, world_size=1, compress="fast", peer_timeout_s=60,
            daemon=daemon.url, token=None,
        )  # fmt: skip
        pipeline = SavePipeline(store, setup, reports.append)
        for step in (1, 2, 3):
            numbers[:step] = 1 if step == 1 else np.nan
            job = SaveJob(
                number=step, slot=0, attempt=new_attempt(step), created_at=system_clock(), aliases={}, trees={},
                local={}, metrics={}, lease=None, slices=[Placed(Slice("model/w", "float32", (1000,), (0, 1000)), 0)],
            )  # fmt: skip
            pipeline.submit(job, numbers.copy().data.cast("B"))
        pipeline.close()
        (warning,) = [report.message for report in reports if isinstance(report, Warned)]
        assert "step 2 has 2 NaN and 0 Inf, first in model/w" in warning
        client = DaemonClient(daemon.url)
        wait_until(lambda: sum(e.kind == "committed" for e in client.events().items) == 3)
        (event,) = [one for one in client.events().items if one.kind == "not_finite"]
        assert event.detail["not_finite"] in (2, 3)  # whichever the daemon read first
        client.close()


STEPS = (10, 20, 30, 40, 50)
WRONG_AT = 40


def go_wrong(store: str, how: str) -> dict[str, Any]:
    """Train and save; at step WRONG_AT one element of a tensor becomes NaN, or one second moment blows up.

    how: nan, moment, or layer, where one layer alone changes between the last two steps. Returns the names.
    """
    seed_all(0)
    shape = Shape(width=32, hidden=128, vocabulary=101, layers=3)
    model = Transformer(shape, Part.whole(shape))
    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model, ignored_params={model.scale})
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("1.mlp.up.weight"))
    with Checkpointer(store, run=how, writer="thread", compress="fast") as checkpointer:
        for step in STEPS:
            if how != "layer" or step < STEPS[-1]:
                for p in model.parameters():
                    generator = torch.Generator().manual_seed(step)
                    noise = torch.randn(p.shape, generator=generator)
                    p.grad = _like(p, noise)
                optim.step()
            if how == "layer" and step == STEPS[-1]:
                _local(parameter).add_(0.5)
            if step == WRONG_AT and dist.get_rank() == 1:
                if how == "nan":
                    _local(parameter)[3, 5] = torch.nan
                if how == "moment":
                    _local(optim.state[parameter]["exp_avg_sq"])[2, 1] = 1e12
            checkpointer.save(model, optim, step=step)
            if how == "nan" and step == WRONG_AT and dist.get_rank() == 1:
                _local(parameter)[3, 5] = 0
    return {"name": name}


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements)
