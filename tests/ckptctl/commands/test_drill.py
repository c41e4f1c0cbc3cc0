from pathlib import Path

from ckptstore.commits.catalog import latest, list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon


def _flip(folder: Path, filled: Store) -> str:
    run = Run(filled, "gpt")
    found = latest(run)
    path = folder / run.keys.shard(found.attempt, "shard-00000.ckpt")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return found.id


def test_a_healthy_run(folder: Path, filled: Store) -> None:
    assert invoke("drill", "gpt", "--last", "--store", folder).code == 4
    done = invoke("drill", "gpt", "--ranks", 8, "--ranks", 512, "--store", folder, "-o", "json")
    assert done.code == 0, done.stderr
    newest = latest(Run(filled, "gpt"))
    assert done.json["id"] == newest.id
    assert done.json["ok"]
    assert [layout["ranks"] for layout in done.json["layouts"]] == [1, 8, 512]
    assert invoke("drill", "gpt", "--last", "--store", folder, "-o", "json").json == done.json
    table = invoke("drill", "gpt@10", "--rate", "1GB", "--store", folder)
    assert table.code == 0
    assert "restores" in table.stdout
    assert "TOGETHER" in table.stdout
    assert invoke("drill", "gpt", "--last", "--ranks", 8, "--store", folder).code == 2
    assert invoke("drill", "gpt", "--ranks", 0, "--store", folder).code == 2


def test_a_flipped_byte_is_named(folder: Path, filled: Store) -> None:
    id = _flip(folder, filled)
    done = invoke("drill", "gpt", "--store", folder)
    assert done.code == 5
    assert f"chunk 0 of shard-00000.ckpt of {id} does not match its checksum" in done.stdout
    assert [c.id for c in list_checkpoints(Run(filled, "gpt")) if c.state == "corrupt"] == [id]
    assert invoke("drill", "gpt", "--store", folder, "-o", "id").code == 0, "the one before it"


def test_through_a_daemon(folder: Path, filled: Store) -> None:
    with running_daemon(f"file://{folder}") as daemon:
        assert invoke("drill", "gpt", "--last", "--url", daemon.url).code == 4
        done = invoke("drill", "gpt", "--ranks", 8, "--url", daemon.url, "-o", "json")
        assert done.code == 0, done.stderr
        assert invoke("drill", "gpt", "--last", "--url", daemon.url, "-o", "json").json == done.json
        id = _flip(folder, filled)
        failed = invoke("drill", id, "--url", daemon.url, "-o", "id")
        assert failed.code == 5
        assert failed.stdout.split() == [id]
        assert invoke("drill", "gpt", "--rate", "1MB", "--url", daemon.url).code == 2
