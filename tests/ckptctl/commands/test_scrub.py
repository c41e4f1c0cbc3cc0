import shutil
from pathlib import Path

from ckptstore.commits.catalog import State, latest, list_checkpoints
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon


def _flip(folder: Path, filled: Store, step: int) -> tuple[str, Path]:
    run = Run(filled, "gpt")
    (found,) = (c for c in list_checkpoints(run) if c.step == step)
    path = folder / run.keys.shard(found.attempt, "shard-00000.ckpt")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return found.id, path


def test_damage_is_remembered_until_it_is_repaired(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    id, path = _flip(folder, filled, 40)
    done = invoke("scrub", "gpt", "--store", folder, "-o", "json")
    assert done.code == 5
    assert [body["ok"] for body in done.json].count(False) == 1
    listed = list_checkpoints(run)
    assert {c.id for c in listed if c.state is State.CORRUPT} == {id}
    assert latest(run).step == 30
    assert "corrupt" in invoke("ls", "--store", folder).stdout
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert invoke("scrub", id, "--store", folder).code == 0
    assert latest(run).step == 40


def test_damage_is_healed_from_a_copy(folder: Path, filled: Store, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    id, path = _flip(folder, filled, 40)
    assert invoke("scrub", id, "--store", folder).code == 5
    lost = invoke("scrub", "--heal", "gpt", "--store", folder)
    assert lost.code == 5
    assert "nothing else holds the bytes of chunk" in lost.stdout
    done = invoke("scrub", "--heal", "--from", copy, "gpt", "--store", folder, "-o", "json")
    assert done.code == 0
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
        done = invoke("scrub", "--heal", "gpt", "--url", daemon.url, "-o", "json")
        assert done.code == 0, done.stderr
        assert done.json["result"]["num_healed"] == 1
        assert done.json["result"]["num_corrupt"] == 0
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
