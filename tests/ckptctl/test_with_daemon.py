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
from tests.support.command_line import Finished, Terminal, invoke, run, succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until


def both(daemon: Daemon, folder: Path, *args: object) -> tuple[Finished, Finished]:
    """The same command through the daemon and on the store."""
    return invoke(*args, "--url", daemon.url), invoke(*args, "--store", folder)


def test_what_there_is(daemon: Daemon, folder: Path) -> None:
    for args in (
        ("ls", "*"), ("ls", "gpt", "--limit", "3"), ("latest", "wide"), ("latest", "gpt"), ("runs",),
        ("show", "gpt@30"), ("show", "gpt@latest", "--entries", "model/s*"),
        ("verify", "--all"), ("verify", "gpt@20"), ("prune", "--keep", "2", "--dry-run"),
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


def test_damage_is_found_through_the_daemon(daemon: Daemon, folder: Path, filled: Store, tmp_path: Path) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    shard = folder / run.keys.shard(newest.attempt, "shard-00000.ckpt")
    shard.write_bytes(b"\0" * 100 + shard.read_bytes()[100:])
    through, direct = both(daemon, folder, "verify", "--all", "-o", "json")
    assert (through.code, direct.code, through.json) == (5, 5, direct.json)
    assert invoke("export", newest.id, "--to", tmp_path / "x.pt", "--url", daemon.url).code == 5
    assert not (tmp_path / "x.pt").exists()


def test_prune_deletes_what_it_showed(daemon: Daemon, folder: Path, filled: Store) -> None:
    plan = invoke("prune", "--keep", 2, "--dry-run", "--url", daemon.url, "-o", "id").stdout.split()
    with Terminal("prune", "--keep", "2", "--url", daemon.url, columns=200) as terminal:
        terminal.wait_for("Delete 3 checkpoints, 6.8 MiB, freed after 24h 00m? [y/N] ")
        assert all(name.partition(".")[0] in terminal.screen for name in plan)
        terminal.type("y\n")
        assert terminal.finish() == 0
        assert "Hid 3 checkpoints; 6.8 MiB are freed in 24h 00m" in terminal.screen
    through, direct = both(daemon, folder, "ls", "*", "-o", "json")
    assert (through.json, [c.step for c in list_checkpoints(Run(filled, "gpt"))]) == (direct.json, [40, 30])
    done = invoke("prune", "--keep", 1, "--yes", "--url", daemon.url, "-o", "json").json
    assert [i["checkpoint"]["step"] for i in done["items"] if not i["reasons"]] == [30]


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


def test_what_is_pinned_stays(daemon: Daemon, folder: Path) -> None:
    for name in ("paper", "v1.0"):
        through, direct = both(daemon, folder, "pin", "gpt@10", name)
        assert (through.code, through.stdout) == (0, direct.stdout)
    through, direct = both(daemon, folder, "pin", "-o", "json")
    assert (through.json, len(through.json)) == (direct.json, 2)
    for args in (("rm", "gpt@10", "--yes"), ("pin", "gpt@10", "a/b"), ("pin", "gpt@10", ""), ("pin", "gpt@11", "x")):
        through, direct = both(daemon, folder, *args, "-o", "json")
        assert (through.code, through.error["code"]) == (direct.code, direct.error["code"])
        assert through.code != 0
    for _ in range(2):
        through, direct = both(daemon, folder, "pin", "gpt@10", "paper", "--remove")
        assert (through.code, through.stdout) == (0, direct.stdout)
    assert [body["name"] for body in invoke("pin", "--url", daemon.url, "-o", "json").json] == ["v1.0"]


def test_policies_are_changed(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("default: {keep_last: 500}\n")
    done = invoke("policy", "apply", file, "--reason", "space", "--url", daemon.url)
    assert (done.code, done.stdout) == (0, "policies, version 1, are in force\n")
    done = invoke("policy", "apply", file, "--expect", 0, "--url", daemon.url, "-o", "json")
    assert (done.code, done.error["code"]) == (6, "conflict")
    assert invoke("policy", "clear", "--url", daemon.url).code == 0
    for args in (("show",), ("show", "gpt"), ("history",), ("history", "--limit", 1)):
        for output in ("table", "json", "id"):
            through, direct = both(daemon, folder, "policy", *args, "-o", output)
            assert (through.code, through.stdout) == (direct.code, direct.stdout)
    history = invoke("policy", "history", "--url", daemon.url, "-o", "json").json
    assert [(version["version"], version["reason"], version["by"]) for version in history] == [
        (2, "", "anonymous"),
        (1, "space", "anonymous"),
    ]
    assert invoke("policy", "set", "gpt", "--keep", 400, "--url", daemon.url).code == 0
    assert "keep_last: 400" in invoke("policy", "show", "gpt", "--store", folder).stdout


def test_gc_is_a_job_and_prints_what_gc_on_the_store_prints(daemon: Daemon, folder: Path) -> None:
    for args in (("gc", "-o", "json"), ("gc", "gpt")):
        through, direct = both(daemon, folder, *args)
        assert (through.code, through.stdout) == (direct.code, direct.stdout) == (0, through.stdout)
    jobs = invoke("jobs", "--url", daemon.url, "-o", "json").json
    assert [(job["kind"], job["state"]) for job in jobs[:2]] == [("gc", "succeeded")] * 2
    assert invoke("gc", "--grace", "1h", "--url", daemon.url).code == 2
    failed = invoke("gc", "typo", "--url", daemon.url, "-o", "json")
    assert (failed.code, json.loads(failed.stderr.splitlines()[-1])["code"]) == (4, "no_checkpoint")


def test_scrub_is_a_job_that_finds_damage_and_its_repair(daemon: Daemon, folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    path = folder / run.keys.shard(newest.attempt, "shard-00000.ckpt")
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    done = invoke("scrub", "gpt", "--url", daemon.url, "-o", "id")
    assert (done.code, done.stdout) == (5, f"{newest.id}\n")
    assert "corrupt" in invoke("ls", "gpt", "--url", daemon.url).stdout
    path.write_bytes(whole)
    assert invoke("scrub", newest.id, "--url", daemon.url).code == 0
    assert "corrupt" not in invoke("ls", "gpt", "--url", daemon.url).stdout
    assert invoke("scrub", "--rate", "1MB", "--url", daemon.url).code == 2


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
