from pathlib import Path

from ckptstore.commits.catalog import State, latest, list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke


def _flip(folder: Path, filled: Store, step: int) -> tuple[str, Path]:
    run = Run(filled, "gpt")
    (found,) = (c for c in list_checkpoints(run) if c.step == step)
    path = folder / run.keys.shard(found.attempt, "shard-00000.ckpt")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    return found.id, path


def test_damage_is_remembered_until_it_is_repaired(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    id, path = _flip(folder, filled, 40)
    done = invoke("scrub", "--run", "gpt", "--store", folder, "-o", "json")
    assert done.code == 5
    assert [body["ok"] for body in done.json].count(False) == 1
    listed = list_checkpoints(run)
    assert {c.id for c in listed if c.state is State.CORRUPT} == {id}
    assert latest(run).step == 30
    assert "corrupt" in invoke("ls", "--store", folder).stdout
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert invoke("scrub", id, "--store", folder).code == 0
    assert latest(run).step == 40


def test_it_goes_on_where_it_stopped_with_the_oldest(folder: Path, filled: Store) -> None:
    seen = []
    for _ in range(3):
        done = invoke("scrub", "--run", "gpt", "--limit", 2, "--store", folder, "-o", "json").json
        seen += [body["id"].split(".")[0] for body in done]
    assert seen == ["gpt@10", "gpt@20", "gpt@30", "gpt@30", "gpt@40", "gpt@10"]
    assert invoke("scrub", "--run", "gpt", "--older", "1h", "--store", folder, "-o", "json").json == []
    plan = invoke("prune", "--keep-every", 1000, "--run", "gpt", "--dry-run", "--store", folder, "-o", "json").json
    assert plan["items"][0]["reasons"] == ["newest", "last-verified"]
