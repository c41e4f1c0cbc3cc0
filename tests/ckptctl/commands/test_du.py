from pathlib import Path

from ckptstore.commits.catalog import latest
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke


def test_bytes_by_run_and_state_add_up(folder: Path, filled: Store) -> None:
    found = invoke("du", "--store", folder, "-o", "json").json
    assert [(body["run"], body["state"], body["checkpoints"]) for body in found] == [
        ("gpt", "committed", 4), ("gpt", "superseded", 1), ("wide", "committed", 1),
    ]  # fmt: skip
    listed = invoke("ls", "*", "--store", folder, "-o", "json").json
    assert sum(body["stored_bytes"] for body in found) == sum(body["stored_bytes"] for body in listed)
    assert invoke("du", "wide", "--store", folder, "-o", "id").stdout == "wide\n"
    assert invoke("du", "--store", folder).stdout.splitlines()[-1].startswith("total")


def test_deleted_data_counts_until_it_is_swept(folder: Path, filled: Store) -> None:
    size = latest(Run(filled, "gpt")).stored_bytes
    assert invoke("rm", "gpt@40", "--yes", "--force", "--store", folder).code == 0
    waste = [body for body in invoke("du", "gpt", "--store", folder, "-o", "json").json if body["state"] == "deleted"]
    assert waste[0]["stored_bytes"] >= size
    assert invoke("gc", "gpt", "--store", folder).code == 0
    assert invoke("du", "gpt", "--store", folder, "-o", "json").json[-1]["state"] == "deleted"


def test_a_run_without_checkpoints_may_have_deleted_data(folder: Path, filled: Store) -> None:
    size = latest(Run(filled, "wide")).stored_bytes
    assert invoke("rm", "wide@5", "--yes", "--force", "--store", folder).code == 0
    [body] = invoke("du", "wide", "--store", folder, "-o", "json").json
    assert (body["state"], body["checkpoints"], body["stored_bytes"] >= size) == ("deleted", None, True)


def test_the_parts_of_one_checkpoint(training: Path) -> None:
    name = invoke("ls", "*", "--store", training, "-o", "id").stdout.strip()
    parts = invoke("du", name, "--store", training, "-o", "json").json
    shown = invoke("show", name, "--store", training, "-o", "json").json["entries"]
    assert {part["part"] for part in parts} == {entry["name"].split("/")[0] for entry in shown}
    assert sum(part["raw_bytes"] for part in parts) == sum(entry["bytes"] for entry in shown)
    deep = invoke("du", name, "--depth", 9, "--store", training, "-o", "id").stdout.split()
    assert sorted(deep) == sorted(entry["name"] for entry in shown)
