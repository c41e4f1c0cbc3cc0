from pathlib import Path

import pytest

from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.leases import active_leases
from ckptstore.names import RunKeys
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard_path(folder: Path, checkpoint: Checkpoint) -> Path:
    return folder / RunKeys(checkpoint.run).shard(checkpoint.attempt, "shard-00000.ckpt")


def test_a_sound_checkpoint_is_ok(folder: Path) -> None:
    done = invoke("verify", "gpt@40", "--store", folder)
    assert (done.code, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["CHECKPOINT", "CHUNKS", "STORED", "RESULT"],
        ["gpt@40", "14", "2.3", "MiB", "ok"],
    ]


def test_all_or_one_run_or_one_checkpoint(folder: Path) -> None:
    def verified(*args: str) -> list[str]:
        results = invoke("verify", *args, "--store", folder, "-o", "json").json
        assert all(result["ok"] for result in results)
        return [result["id"].partition(".")[0] for result in results]

    assert verified("--all") == ["gpt@40", "gpt@30", "gpt@30", "gpt@20", "gpt@10", "wide@5"]
    assert verified("wide") == ["wide@5"]
    assert verified("gpt@20") == ["gpt@20"]
    assert verified("gpt@20", "w*") == ["gpt@20", "wide@5"]


@pytest.mark.parametrize("args", [(), ("gpt@40", "--all"), ("gpt", "--all")])
def test_what_to_verify_must_be_clear(folder: Path, args: tuple[str, ...]) -> None:
    assert invoke("verify", *args, "--store", folder).code == 2


def test_every_problem_of_every_checkpoint_is_listed(folder: Path, filled: Store) -> None:
    newest, _, _, fourth, _ = list_checkpoints(Run(filled, "gpt"))
    shard = shard_path(folder, newest)
    flip(shard, 0)
    flip(shard, shard.stat().st_size - 1)
    shard_path(folder, fourth).unlink()
    done = invoke("verify", "--all", "--store", folder)
    assert done.code == 5
    assert "2 of 6 checkpoints damaged" in done.stderr
    assert "chunk 0 of shard-00000.ckpt" in done.stdout
    assert "chunk 13 of shard-00000.ckpt" in done.stdout
    verdicts = {line.split()[0]: line.split()[4:] for line in done.stdout.splitlines()[1:7]}
    assert verdicts["gpt@40"] == ["2", "problems"]
    assert verdicts["gpt@20"] == ["14", "problems"]
    assert sum(verdict == ["ok"] for verdict in verdicts.values()) == 4


def test_programs_get_results_and_the_error(folder: Path, filled: Store) -> None:
    newest = list_checkpoints(Run(filled, "gpt"))[0]
    flip(shard_path(folder, newest), 0)
    done = invoke("verify", "--all", "--store", folder, "-o", "json")
    assert (done.code, done.error["code"]) == (5, "corrupt")
    assert [result["id"] for result in done.json if not result["ok"]] == [newest.id]
    assert invoke("verify", "--all", "--store", folder, "-o", "id").stdout == f"{newest.id}\n"


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


def test_it_restores_on_so_many_ranks(folder: Path, filled: Store) -> None:
    done = invoke("verify", "gpt@latest", "--ranks", 8, "--ranks", 512, "--store", folder, "-o", "json")
    assert done.code == 0, done.stderr
    (found,) = done.json
    assert [one["ranks"] for one in found["estimates"]] == [1, 8, 512]
    table = invoke("verify", "gpt@10", "--ranks", 2, "--store", folder)
    assert "restores:" in table.stdout
    assert "TOGETHER" in table.stdout
    assert invoke("verify", "gpt", "--ranks", 0, "--store", folder).code == 2
    newest = list_checkpoints(Run(filled, "gpt"))[0]
    flip(shard_path(folder, newest), 0)
    damaged = invoke("verify", newest.id, "--ranks", 2, "--store", folder)
    assert damaged.code == 5
    assert f"chunk 0 of shard-00000.ckpt of {newest.id} does not match its checksum" in damaged.stdout


def test_through_a_daemon_the_estimate_is_that_of_its_readers(folder: Path, filled: Store) -> None:
    with running_daemon(f"file://{folder}") as daemon:
        done = invoke("verify", "gpt@latest", "--ranks", 8, "--url", daemon.url, "-o", "json")
    assert done.code == 0, done.stderr
    assert [one["ranks"] for one in done.json[0]["estimates"]] == [1, 8]


def test_no_lease_is_left_behind(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt", lambda: 0.0)
    invoke("verify", "--all", "--store", folder)
    assert list(filled.list(run.keys.leases)) == []
    assert active_leases(run) == {}


def test_nothing_to_verify_is_not_success_for_a_run_that_is_named(folder: Path) -> None:
    assert invoke("verify", "typo", "--store", folder).code == 4
    assert invoke("verify", "gpt@41", "--store", folder).code == 4
