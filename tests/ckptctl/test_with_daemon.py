"""Through a daemon (--url) every command says what it says on the store itself (--store)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptstore.commits.catalog import list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import flip, write_checkpoint
from tests.support.command_line import Finished, invoke, run, succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until


def both(daemon: Daemon, folder: Path, *args: object) -> tuple[Finished, Finished]:
    """The same command through the daemon and on the store."""
    return invoke(*args, "--url", daemon.url), invoke(*args, "--store", folder)


def test_what_there_is(daemon: Daemon, folder: Path) -> None:
    for args in (
        ("ls", "*"), ("ls", "gpt", "--limit", "3"), ("latest", "gpt"), ("runs",), ("show", "gpt@30"),
        ("show", "gpt@latest", "--entries", "model/s*"), ("verify", "wide", "gpt@20"),
        ("prune", "--keep", "2", "--dry-run"),
    ):  # fmt: skip
        for output in ("json", "id"):
            through, direct = both(daemon, folder, *args, "-o", output)
            assert (through.code, through.stdout) == (direct.code, direct.stdout), args
            assert (through.code, through.stdout.strip() != "") == (0, args[0] != "verify" or output == "json")
        through, direct = both(daemon, folder, *args)
        assert through.stdout.splitlines()[0] == direct.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "args",
    [
        ("latest",), ("latest", "typo"), ("ls", "typo"), ("ls", "../x"), ("show", "gpt@31"),
        ("prune", "--keep", "1", "--yes", "typo"), ("prune", "--keep", "0", "--yes"), ("prune", "--keep", "1"),
        ("pin", "gpt@10", "a/b"), ("pin", "gpt@10", ""), ("pin", "gpt@11", "x"),
    ],
)  # fmt: skip
def test_what_goes_wrong_goes_wrong_alike(daemon: Daemon, folder: Path, args: tuple[str, ...]) -> None:
    through, direct = both(daemon, folder, *args, "-o", "json")
    assert through.code == direct.code
    assert through.code in (2, 4)
    assert through.error["code"] == direct.error["code"]


def test_exports_are_the_same_file(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    for suffix in ("safetensors", "pt"):
        files = [tmp_path / f"{name}.{suffix}" for name in ("through", "direct")]
        assert invoke("export", "gpt@40", "--to", files[0], "--url", daemon.url).code == 0
        assert invoke("export", "gpt@40", "--to", files[1], "--store", folder).code == 0
        assert _content(files[0]) == _content(files[1])


def test_reindex_finds_what_the_store_holds(daemon: Daemon, folder: Path, filled: Store) -> None:
    write_checkpoint(filled, "new", 1)
    assert invoke("reindex", "--url", daemon.url).stdout == "Indexed 7 checkpoints of 3 runs\n"
    assert invoke("reindex", "--url", daemon.url, "-o", "json").json == {"runs": 3, "checkpoints": 7}
    through, direct = both(daemon, folder, "ls", "*", "-o", "json")
    assert through.json == direct.json


def test_verify_looks_at_the_store_not_into_the_cache(daemon: Daemon, folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    daemon.get(f"/v1/checkpoints/{newest.id}/shards/shard-00000.ckpt").raise_for_status()
    path = folder / run.keys.shard(newest.attempt, "shard-00000.ckpt")
    flip(path, 100)
    assert invoke("verify", newest.id, "--url", daemon.url).code == 5


def test_a_deletion_is_seen_and_taken_back(daemon: Daemon, folder: Path, filled: Store) -> None:
    oldest = list_checkpoints(Run(filled, "gpt"))[-1]
    assert invoke("rm", "gpt@10", "--url", daemon.url).code == 2, "there is no terminal to confirm"
    done = invoke("rm", "gpt@10", "--yes", "--grace", "1h", "--reason", "diverged & blown up", "--url", daemon.url)
    assert (done.code, done.stdout) == (0, f"deleted {oldest.id}; ckptctl undelete restores it for 1h 00m\n")
    through, direct = both(daemon, folder, "undelete", "-o", "json")
    assert through.json == direct.json
    assert [(body["id"], body["reason"], body["by"]) for body in through.json] == [
        (oldest.id, "diverged & blown up", "anonymous")
    ]
    done = succeed("undelete", "gpt@10", "--reason", "it did not", "--url", daemon.url)
    assert done.stdout == f"{oldest.id} is back, and stays until ckptctl pin gpt@10 undeleted --remove\n"
    assert invoke("rm", "gpt@10", "--yes", "--grace", "0s", "--url", daemon.url).code == 6
    assert invoke("pin", "gpt@10", "undeleted", "--remove", "--url", daemon.url).code == 0
    assert invoke("rm", "gpt@10", "--yes", "--grace", "0s", "--url", daemon.url).code == 0
    for through in both(daemon, folder, "undelete", "gpt@10", "-o", "json"):
        assert (through.code, through.error["code"]) == (6, "sweep_begun")
    through, direct = both(daemon, folder, "audit", "gpt", "-o", "json")
    assert through.json == direct.json
    actions = ["delete", "pin", "undelete", "unpin", "delete", "sweep"]
    assert [record["action"] for record in reversed(through.json)][: len(actions)] == actions
    assert invoke("audit", "--limit", 1, "--url", daemon.url, "-o", "json").json == through.json[:1]


def test_the_newest_checkpoint_is_deleted_only_if_that_is_forced(daemon: Daemon, folder: Path, filled: Store) -> None:
    for refused in both(daemon, folder, "rm", "gpt@40", "--yes", "-o", "json"):
        assert (refused.code, refused.error["code"]) == (6, "checkpoint_held")
        assert "--force" in refused.error["hint"]
    assert len(list_checkpoints(Run(filled, "gpt"))) == 5
    for at in (("--url", daemon.url), ("--store", folder)):
        assert invoke("rm", "gpt@latest", "--yes", "--force", *at).code == 0
    assert [checkpoint.step for checkpoint in list_checkpoints(Run(filled, "gpt"))] == [30, 20, 10]


def test_policies_are_changed(daemon: Daemon, folder: Path) -> None:
    for words in ("set gpt --keep 400", "clear", "set gpt --keep 300 --reason space"):
        assert invoke("policy", *words.split(), "--url", daemon.url).code == 0
    for args in (("show",), ("show", "gpt"), ("history",), ("history", "--limit", 1)):
        for output in ("table", "json", "id"):
            through, direct = both(daemon, folder, "policy", *args, "-o", output)
            assert (through.code, through.stdout) == (direct.code, direct.stdout)
    history = invoke("policy", "history", "--url", daemon.url, "-o", "json").json
    assert [(version["reason"], version["by"]) for version in history] == [
        ("space", "anonymous"), ("", "anonymous"), ("", "anonymous"),
    ]  # fmt: skip


def test_gc_is_a_job_and_prints_what_gc_on_the_store_prints(daemon: Daemon, folder: Path) -> None:
    for args in (("gc", "-o", "json"), ("gc", "gpt")):
        through, direct = both(daemon, folder, *args)
        assert (through.code, through.stdout) == (direct.code, direct.stdout) == (0, through.stdout)
    jobs = invoke("jobs", "--url", daemon.url, "-o", "json").json
    assert [(job["kind"], job["state"]) for job in jobs[:2]] == [("gc", "succeeded")] * 2
    assert invoke("gc", "--grace", "1h", "--url", daemon.url).code == 2
    failed = invoke("gc", "typo", "--url", daemon.url, "-o", "json")
    assert (failed.code, json.loads(failed.stderr.splitlines()[-1])["code"]) == (4, "no_checkpoint")


def test_the_token_is_sent(folder: Path) -> None:
    with running_daemon(folder.as_uri(), environment={**os.environ, "CKPTD_TOKEN": "secret of the test"}) as guarded:
        assert run("ls", "--url", guarded.url).code != 0
        assert run("ls", "--url", guarded.url, env={"CKPT_TOKEN": "secret of the test"}).code == 0
        assert invoke("ls", "--url", guarded.url, "--token", "wrong").code != 0


def test_a_daemon_that_is_gone_is_unreachable_not_empty(folder: Path) -> None:
    with running_daemon(folder.as_uri()) as gone:
        wait_until(lambda: invoke("ls", "--url", gone.url).code == 0, "an answer")
        gone.kill()
        done = invoke("latest", "--url", gone.url, "-o", "json")
    assert (done.code, done.error["code"]) == (7, "daemon_unavailable")


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]  # the package writes its header in random order
    state = torch.load(path, weights_only=True)
    return {name: (t.dtype, tuple(t.shape), t.reshape(-1).tolist()) for name, t in state["model"].items()}
