from pathlib import Path

from ckptstore.commits.catalog import list_checkpoints
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import steps, write_checkpoint
from tests.support.command_line import invoke


def test_a_dry_run_shows_what_would_go_and_stay_and_why_and_deletes_nothing(folder: Path, filled: Store) -> None:
    done = invoke("prune", "--keep", 2, "--dry-run", "--store", folder)
    keep, remove = done.stdout.split("\n\n")
    assert keep.splitlines()[0] == "Keep 3 checkpoints of 2 runs, 6.8 MiB"
    assert [(line.split()[0], line.split()[-1]) for line in keep.splitlines()[2:]] == [
        ("gpt@40", "last-1"), ("gpt@30", "last-2"), ("wide@5", "last-1"),
    ]  # fmt: skip
    assert remove.splitlines()[0] == "Remove 3 checkpoints, 6.8 MiB"
    assert [(line.split()[0].partition(".")[0], line.split()[-1]) for line in remove.splitlines()[2:]] == [
        ("gpt@30", "superseded"), ("gpt@20", "older"), ("gpt@10", "older"),
    ]  # fmt: skip
    assert (done.code, steps(filled, "gpt"), steps(filled, "wide")) == (0, [40, 30, 30, 20, 10], [5])


def test_prune_deletes_run_by_run_and_tells_what_went(folder: Path, filled: Store) -> None:
    to_delete = [c.id for c in list_checkpoints(Run(filled, "gpt"))[2:]]
    done = invoke("prune", "--keep", 2, "--yes", "--store", folder)
    assert done.stdout.splitlines() == [
        *(f"removed {name}" for name in to_delete),
        "Hid 3 checkpoints; 6.8 MiB are freed in 24h 00m; ckptctl undelete restores them until then",
    ]
    assert (done.code, steps(filled, "gpt"), steps(filled, "wide")) == (0, [40, 30], [5])
    again = invoke("prune", "--keep", 2, "--yes", "--store", folder)
    assert (again.code, again.stdout.splitlines()[-1]) == (0, "Nothing to remove")


def test_prune_as_json(filled: Store, target: tuple[str, str]) -> None:
    plan = invoke("prune", "--keep", 3, "--dry-run", *target, "-o", "json").json
    gone = [item["checkpoint"]["step"] for item in plan["items"] if not item["reasons"]]
    assert (plan["dry_run"], gone, plan["held"]) == (True, [30, 10], [])
    ids = invoke("prune", "--keep", 3, "--dry-run", *target, "-o", "id").stdout.split()
    done = invoke("prune", "--keep", 3, "--yes", *target, "-o", "json").json
    assert [i["checkpoint"]["id"] for i in done["items"] if not i["reasons"]] == ids
    assert (done["dry_run"], done["freed_bytes"]) == (False, plan["freed_bytes"])
    assert steps(filled, "gpt") == [40, 30, 20]
    assert [body["step"] for body in invoke("ls", "gpt", *target, "-o", "json").json] == [40, 30, 20]


def test_rules_add_up_and_give_reasons(folder: Path, filled: Store) -> None:
    rules = ("--keep-every", 20, "--keep-best", "loss:max:1", "--keep-within", "2h", "--keep-daily", 1)
    plan = invoke("prune", *rules, "gpt", "--dry-run", "--store", folder, "-o", "json").json
    found = {item["checkpoint"]["step"]: item["reasons"] for item in plan["items"] if item["reasons"]}
    assert found.keys() == {40, 20, 10}
    assert found[10] == ["best-loss-1"]
    assert {"every-20", "daily-1"} <= set(found[40])
    small = invoke("prune", "--max-bytes", "3MB", "gpt", "--dry-run", "--store", folder, "-o", "json").json
    assert small["items"][0]["reasons"] == ["fits"]
    assert sum(bool(item["reasons"]) for item in small["items"]) == 1


def test_what_is_saved_in_one_file_stays_full_and_says_so(filled: Store, target: tuple[str, str]) -> None:
    rules = ("gpt", "--keep-full", 1, "--keep-weights", "all", "--dry-run")
    plan = invoke("prune", *rules, *target, "-o", "json").json
    found = {item["checkpoint"]["step"]: item["reasons"] for item in plan["items"] if item["reasons"]}
    assert (found[40], found[20]) == (["full-1", "weights-1"], ["weights-3", "undivided"])
    assert "weights-3, undivided" in invoke("prune", *rules, *target).stdout


def test_most_checkpoints_go_only_after_confirmation_or_force(folder: Path, filled: Store) -> None:
    for step in range(100, 110):
        write_checkpoint(filled, "gpt", step)
    done = invoke("prune", "--keep", 1, "--yes", "--store", folder, "-o", "json")
    assert (done.code, done.error["code"], len(steps(filled, "gpt"))) == (6, "too_much_to_delete", 15)
    assert invoke("prune", "--keep", 1, "--yes", "--force", "--store", folder).code == 0
    assert steps(filled, "gpt") == [109]
