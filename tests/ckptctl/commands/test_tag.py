from pathlib import Path

from ckptstore.stores import Store
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon


def test_tags_and_metrics_on_a_store_and_through_a_daemon(folder: Path, filled: Store) -> None:
    done = invoke("tag", "gpt@10", "paper", "owner=ann", "--metric", "val_loss=2.5", "--store", folder)
    assert done.code == 0
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


def test_tags_that_make_no_sense(folder: Path, filled: Store) -> None:
    for words in ((), ("a b",), ("=x",), ("-m", "loss"), ("-m", "loss=much"), ("-m", "loss=nan")):
        done = invoke("tag", "gpt@10", *words, "--store", folder, "-o", "json")
        assert (done.code, done.error["code"]) == (2, "invalid_request")
    assert invoke("tag", "gpt@11", "paper", "--store", folder).code == 4
