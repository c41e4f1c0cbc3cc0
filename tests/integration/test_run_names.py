"""A run whose name has slashes, equals signs and commas, from its first save until it is deleted."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from torch import nn

import ckpt
from ckpt import Checkpointer
from ckptstore.commits.catalog import latest
from ckptstore.errors import NoCheckpoint
from ckptstore.names import RunKeys
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

RUN, OTHER = "team/sweep/lr=0.1,wd=0", "team/sweep-2"


def save(store: Path, run: str, *steps: int) -> nn.Linear:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(store), run=run) as checkpointer:
        for step in steps:
            checkpointer.save(model, optim, step)
    return model


def test_a_run_named_like_a_path(tmp_path: Path) -> None:
    store, url = tmp_path / "store", (tmp_path / "store").as_uri()
    model = save(store, RUN, 1, 2)
    save(store, OTHER, 1)
    assert sorted(folder.name for folder in store.iterdir() if folder.name[0] != "_") == [
        "team~sweep-2", "team~sweep~lr=0.1,wd=0"
    ]  # fmt: skip
    assert torch.equal(ckpt.load(f"{url}/team~sweep~lr=0.1,wd=0@1")["model/weight"], model.weight)
    with pytest.raises(NoCheckpoint, match="Did you mean run 'team/sweep-2'"):
        ckpt.load(f"{url}/team~swep-2@1")
    restored = nn.Linear(2, 2)
    with Checkpointer(str(store), run=RUN) as checkpointer:
        result = checkpointer.restore(restored)
        assert result is not None
        assert result.step == 2
        assert torch.equal(restored.weight, model.weight)
        assert torch.equal(checkpointer.load(f"{RUN}@1")["model/weight"], model.weight)
    with running_daemon(url) as daemon:
        for at in (("--store", store), ("--url", daemon.url)):
            names = [one["run"] for one in succeed("runs", "team/*", *at, "-o", "json").json]
            assert names == sorted([RUN, OTHER]), at
            found = succeed("ls", "team/sweep/*", *at, "-o", "json").json
            assert [(one["run"], one["step"]) for one in found] == [(RUN, 2), (RUN, 1)]
            assert succeed("show", f"{RUN}@2", *at, "-o", "json").json["checkpoint"]["run"] == RUN
            assert succeed("verify", RUN, *at).code == 0
            succeed("export", f"{RUN}@2", "--to", tmp_path / f"{at[0]}.safetensors", *at)
        with daemon.client() as client:
            assert client.runs() == sorted([RUN, OTHER])
            assert [c.step for c in client.checkpoints(RUN)] == [2, 1]
        for path in (RUN, quote(RUN, safe="")):
            assert daemon.get(f"/v1/runs/{path}").json()["run"] == RUN
            assert daemon.get(f"/v1/checkpoints/{path}@2/shards").json()["items"]
            assert daemon.post(f"/v1/runs/{path}/preempt", {"grace_s": 60}).status_code == 201
            for page in (f"/runs/{path}", f"/goodput/{path}", f"/checkpoints/{path}@2"):
                assert RUN in daemon.get(page).text, page
        assert daemon.get("/checkpoints/latest", params={"run": RUN}).json()["step"] == 2
        succeed("pin", f"{RUN}@1", "paper", "--url", daemon.url)
        succeed("pin", f"{RUN}@1", "paper", "--remove", "--url", daemon.url)
        succeed("rm", RUN, "--all", "--yes", "--url", daemon.url)
        wait_until(lambda: invoke("ls", RUN, "--url", daemon.url).code == 4, "the end of the run in the index")
    assert [one["run"] for one in succeed("runs", "--store", store, "-o", "json").json if one["latest"]] == [OTHER]


def test_its_heartbeats_follow_its_checkpoints_out_of_a_local_tier(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path / "remote"), run=RUN, local=str(tmp_path / "local")) as checkpointer:
        checkpointer.save(model, optim, 1)
    remote = open_store(str(tmp_path / "remote"))
    wait_until(lambda: list(remote.list(RunKeys(RUN).heartbeats)), "a heartbeat in the remote store")
    assert latest(Run(remote, RUN)).step == 1


@pytest.mark.parametrize("run", ["team/", "/team", "a//b", "a/../b", "a/.b", "a/_b", "a~b"])
def test_names_that_would_be_ambiguous_are_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CkptError, match="run name") as caught:
        Checkpointer(str(tmp_path), run=run)
    assert "digit" in caught.value.hint
