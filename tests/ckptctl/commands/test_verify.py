from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.commits.leases import active_leases
from ckptstore.names import RunKeys
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import flip, sample_arrays, write_checkpoint
from tests.support.command_line import invoke, succeed
from tests.support.daemons import Daemon, running_daemon


def shard_path(folder: Path, checkpoint: Checkpoint) -> Path:
    return folder / RunKeys(checkpoint.run).shard(checkpoint.attempt, "shard-00000.ckpt")


def test_all_or_one_run_or_one_checkpoint_that_is_ok(folder: Path) -> None:
    def verified(*args: str) -> list[str]:
        results = invoke("verify", *args, "--store", folder, "-o", "json").json
        assert all(result["ok"] for result in results)
        return [result["id"].partition(".")[0] for result in results]

    assert verified("*") == ["gpt@40", "gpt@30", "gpt@30", "gpt@20", "gpt@10", "wide@5"]
    assert (verified("wide"), verified("gpt@20")) == (["wide@5"], ["gpt@20"])
    assert verified("gpt@20", "w*") == ["gpt@20", "wide@5"]
    done = invoke("verify", "gpt@40", "--store", folder)
    assert (done.code, done.stderr) == (0, "")
    header, row = (line.split() for line in done.stdout.splitlines())
    assert (header, row) == (["CHECKPOINT", "CHUNKS", "STORED", "RESULT"], ["gpt@40", "14", "2.3", "MiB", "ok"])


def test_every_problem_of_every_checkpoint_is_listed(
    folder: Path, filled: Store, target: tuple[str, str], tmp_path: Path
) -> None:
    newest, _, _, fourth, _ = list_checkpoints(Run(filled, "gpt"))
    shard = shard_path(folder, newest)
    flip(shard, 0)
    flip(shard, shard.stat().st_size - 1)
    shard_path(folder, fourth).unlink()
    done = invoke("verify", "*", *target)
    assert done.code == 5
    assert "2 of 6 checkpoints damaged" in done.stderr
    assert "chunk 0 of shard-00000.ckpt" in done.stdout
    assert "chunk 13 of shard-00000.ckpt" in done.stdout
    verdicts = {line.split()[0]: line.split()[4:] for line in done.stdout.splitlines()[1:7]}
    assert (verdicts["gpt@40"], verdicts["gpt@20"]) == (["2", "problems"], ["14", "problems"])
    assert sum(verdict == ["ok"] for verdict in verdicts.values()) == 4
    programs = invoke("verify", "*", *target, "-o", "json")
    assert (programs.code, programs.error["code"]) == (5, "corrupt")
    assert [result["id"] for result in programs.json if not result["ok"]] == [newest.id, fourth.id]
    assert invoke("verify", "*", *target, "-o", "id").stdout == f"{newest.id}\n{fourth.id}\n"
    assert invoke("export", newest.id, "--to", tmp_path / "x.pt", *target).code == 5
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("which", ["outcome", "manifest", "receipt"])
def test_damaged_documents_are_found(folder: Path, filled: Store, which: str) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    keys = {
        "outcome": run.keys.outcome(newest.attempt),
        "manifest": run.keys.manifest(newest.attempt),
        "receipt": run.keys.receipt(newest.attempt, 0),
    }
    flip(folder / keys[which], 40)
    done = invoke("verify", newest.id, "--store", folder, "-o", "json")
    assert (done.code, len(done.json[0]["problems"])) == (5, 1)


def test_it_restores_on_so_many_ranks(folder: Path) -> None:
    (found,) = succeed("verify", "gpt@latest", "--ranks", 8, "--ranks", 512, "--store", folder, "-o", "json").json
    assert [one["ranks"] for one in found["estimates"]] == [1, 8, 512]
    table = invoke("verify", "gpt@10", "--ranks", 2, "--store", folder)
    assert "restores:" in table.stdout
    assert "TOGETHER" in table.stdout


def test_through_a_daemon_the_estimate_is_that_of_its_readers(daemon: Daemon) -> None:
    done = succeed("verify", "gpt@latest", "--ranks", 8, "--url", daemon.url, "-o", "json")
    assert [one["ranks"] for one in done.json[0]["estimates"]] == [1, 8]


def test_no_lease_is_left_behind(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt", lambda: 0.0)
    invoke("verify", "*", "--store", folder)
    assert (list(filled.list(run.keys.leases)), active_leases(run)) == ([], {})


def _flip(folder: Path, filled: Store, step: int) -> tuple[str, Path]:
    (found,) = (c for c in list_checkpoints(Run(filled, "gpt")) if c.step == step)
    flip(path := shard_path(folder, found), 0)
    return found.id, path


def test_damage_is_remembered_until_it_is_repaired(folder: Path, filled: Store, target: tuple[str, str]) -> None:
    run, (id, path) = Run(filled, "gpt"), _flip(folder, filled, 40)
    done = invoke("scrub", "gpt", *target, "-o", "id")
    assert (done.code, done.stdout) == (5, f"{id}\n")
    assert ({c.id for c in list_checkpoints(run) if c.state is State.CORRUPT}, latest(run).step) == ({id}, 30)
    assert "corrupt" in invoke("ls", "gpt", *target).stdout
    flip(path, 0)
    assert (invoke("scrub", id, *target).code, latest(run).step) == (0, 40)
    assert "corrupt" not in invoke("ls", "gpt", *target).stdout
    assert invoke("scrub", "--rate", "1MB", *target).code == (2 if target[0] == "--url" else 0)


def test_damage_is_healed_from_a_copy(folder: Path, filled: Store, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    id, path = _flip(folder, filled, 40)
    assert invoke("scrub", id, "--store", folder).code == 5
    lost = invoke("scrub", "--heal", "gpt", "--store", folder)
    assert lost.code == 5
    assert "nothing else holds the bytes of chunk" in lost.stdout
    done = succeed("scrub", "--heal", "--from", copy, "gpt", "--store", folder, "-o", "json")
    (healed,) = (body["healed"] for body in done.json if body["id"] == id)
    assert [key.rsplit("/", 1)[-1] for key in healed] == ["shard-00000.ckpt"]
    assert path.read_bytes() == (copy / path.relative_to(folder)).read_bytes()
    assert latest(Run(filled, "gpt")).step == 40
    assert "heal" in invoke("audit", "gpt", "--store", folder).stdout
    assert invoke("scrub", "--from", copy, "--store", folder).code == 2


def test_a_daemon_heals_in_a_job(folder: Path, filled: Store) -> None:
    """A later checkpoint holds the same bytes. What the cache has of the damaged object is not served any more."""
    whole = next(c for c in list_checkpoints(Run(filled, "gpt")) if c.step == 40)
    write_checkpoint(filled, "gpt", 50, sample_arrays(40))
    _flip(folder, filled, 40)
    with running_daemon(f"file://{folder}") as daemon, daemon.client() as client:
        assert not verify(client, whole).ok
        done = succeed("scrub", "--heal", "gpt", "--url", daemon.url, "-o", "json")
        assert (done.json["result"]["num_healed"], done.json["result"]["num_corrupt"]) == (1, 0)
        assert verify(client, whole).ok
        assert [c.id for c in client.checkpoints("gpt") if c.state is State.CORRUPT] == []
        assert invoke("scrub", "--heal", "--from", folder, "--url", daemon.url).code == 2


def test_it_goes_on_where_it_stopped_with_the_oldest(folder: Path, filled: Store) -> None:
    seen = []
    for _ in range(3):
        done = invoke("scrub", "gpt", "--limit", 2, "--store", folder, "-o", "json").json
        seen += [body["id"].split(".")[0] for body in done]
    assert seen == ["gpt@10", "gpt@20", "gpt@30", "gpt@30", "gpt@40", "gpt@10"]
    assert invoke("scrub", "gpt", "--older", "1h", "--store", folder, "-o", "json").json == []
    plan = invoke("prune", "--keep-every", 1000, "gpt", "--dry-run", "--store", folder, "-o", "json").json
    assert plan["items"][0]["reasons"] == ["newest", "last-verified"]
