from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ckptstore.commits.catalog import list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon


def test_tags_and_metrics_on_a_store_and_through_a_daemon(folder: Path, filled: Store) -> None:
    done = succeed("tag", "gpt@10", "paper", "owner=ann", "--metric", "val_loss=2.5", "--store", folder)
    assert "owner=ann paper" in done.stdout
    with running_daemon(folder.as_uri()) as daemon:
        body = invoke("tag", "gpt@10", "paper-", "draft=1", "--url", daemon.url, "-o", "json").json
        assert (body["tags"], body["metrics"]["val_loss"]) == ({"draft": "1", "owner": "ann"}, 2.5)
        for target in (("--url", daemon.url), ("--store", str(folder))):
            assert invoke("ls", "--tag", "owner", "-o", "id", *target).stdout.split() == [body["id"]]
            assert invoke("ls", "--tag", "owner=bob", "-o", "id", *target).stdout == ""
            assert "draft=1 owner=ann" in invoke("ls", "gpt", *target).stdout
            assert "TAGS" not in invoke("ls", "wide", *target).stdout
            assert "draft=1 owner=ann" in invoke("show", "gpt@10", *target).stdout
    body = invoke("tag", "gpt@10", "draft-", "owner-", "-m", "val_loss-", "--store", folder, "-o", "json").json
    assert (body["tags"], "val_loss" in body["metrics"]) == ({}, False)


def test_what_is_pinned_stays_until_it_is_unpinned(filled: Store, target: tuple[str, str]) -> None:
    run = Run(filled, "gpt")
    oldest = list_checkpoints(run)[-1]
    for name in ("paper", "v1.0"):
        done = invoke("pin", "gpt@10", name, *target)
        assert (done.code, done.stdout) == (0, f"pinned {oldest.id} as {name}\n")
    pins = invoke("pin", *target, "-o", "json").json
    assert pins == [{"id": oldest.id, "name": "paper"}, {"id": oldest.id, "name": "v1.0"}]
    assert invoke("pin", *target).stdout.split() == [
        "CHECKPOINT", "PIN", oldest.id, "paper", oldest.id, "v1.0",
    ]  # fmt: skip
    plan = invoke("prune", "--keep", 1, "gpt", "--dry-run", *target)
    assert "pin:paper, pin:v1.0" in plan.stdout
    assert invoke("prune", "--keep", 1, "gpt", "--yes", *target).code == 0
    assert [c.step for c in list_checkpoints(run)] == [40, 10]
    refused = invoke("rm", "gpt@10", "--yes", *target, "-o", "json")
    assert (refused.code, refused.error["code"]) == (6, "checkpoint_held")
    for name in ("paper", "v1.0", "v1.0"):
        assert invoke("pin", "gpt@10", name, "--remove", *target).code == 0
    assert invoke("pin", *target, "-o", "json").json == []
    assert "ckptctl undelete restores it for 24h 00m" in succeed("rm", "gpt@10", "--yes", *target).stdout
    assert [c.step for c in list_checkpoints(run)] == [40]


def test_a_run_does_not_name_the_pinned_checkpoint(folder: Path, filled: Store) -> None:
    """Its newest checkpoint is another one as soon as training goes on, and a missing pin is ignored."""
    assert invoke("pin", "gpt", "paper", "--store", folder).code == 0
    pins = invoke("pin", "gpt", "--store", folder, "-o", "json").json
    done = invoke("pin", "gpt", "paper", "--remove", "--store", folder)
    assert (done.code, "ckptctl pin gpt@STEP paper --remove" in done.stderr) == (2, True)
    assert invoke("pin", "gpt", "--store", folder, "-o", "json").json == pins


def test_a_name_that_moves_and_the_best_of_a_metric(target: tuple[str, str]) -> None:
    def shown(which: str) -> str:
        return invoke("show", which, *target, "-o", "id").stdout.partition(".")[0]

    for step in (10, 30, 20):
        assert invoke("tag", f"gpt@{step}", "prod", "v=1", "--move", *target).code == 0
        assert shown("gpt@prod") == f"gpt@{step}"
        tagged = invoke("ls", "--tag", "prod", *target, "-o", "json").json
        assert [body["step"] for body in tagged] == [step]
    assert (shown("gpt@best:loss:min"), shown("gpt@best:loss:max")) == ("gpt@40", "gpt@10")
    if target[0] == "--url":
        assert httpx.get(f"{target[1]}/v1/checkpoints/gpt@prod").json()["step"] == 20
    missing = invoke("show", "gpt@best:acc:max", *target)
    assert (missing.code, "no checkpoint named 'best:acc:max'" in missing.stderr) == (4, True)
    assert invoke("tag", "gpt@20", "prod-", "--move", *target).code == 0
    assert invoke("show", "gpt@prod", *target).code == 4


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (("pin", "gpt@1*", "paper"), ["gpt@10"]), (("pin", "*", "paper"), ["gpt@40", "wide@5"]),
        (("tag", "gpt@?0", "draft"), ["gpt@40", "gpt@30", "gpt@30", "gpt@20", "gpt@10"]),
        (("tag", "*", "prod", "--move"), ["gpt@40", "wide@5"]), (("tag", "gpt@20", "draft"), ["gpt@20"]),
    ],
)  # fmt: skip
def test_patterns_name_checkpoints_and_a_dry_run_shows_them(
    folder: Path, args: tuple[str, ...], meant: list[str]
) -> None:
    at = ("--store", folder, "-o", "id")
    dry = succeed(*args, "--dry-run", *at).stdout
    assert [name.partition(".")[0] for name in dry.split()] == meant
    assert succeed("pin", *at).stdout == succeed("ls", "--tag", "draft", *at).stdout == ""
    assert succeed(*args, *at).stdout == dry
    done = succeed("pin", *at).stdout if args[0] == "pin" else succeed("ls", "--tag", args[2], *at).stdout
    assert sorted(done.split()) == sorted(dry.split())


def test_a_name_that_moves_is_on_one_checkpoint_of_a_run(folder: Path) -> None:
    done = invoke("tag", "gpt@*", "prod", "--move", "--store", folder)
    assert (done.code, "several checkpoints" in done.stderr) == (2, True)
