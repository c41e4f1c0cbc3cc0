from pathlib import Path

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints, visible_attempts
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, steps, write_checkpoint, write_rank
from tests.support.command_line import Terminal, invoke, succeed
from tests.support.waiting import wait_until


def test_gc_commits_what_is_complete_and_deletes_old_orphans(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    complete, partial, fresh = (Attempt(step, new_ulid(system_clock())) for step in (50, 60, 70))
    write_rank(filled, "gpt", complete, sample_arrays())
    write_rank(filled, "gpt", partial, sample_arrays(), rank=0, world_size=2)
    before = invoke("gc", "--store", folder, "-o", "json").json
    assert [(r["run"], len(r["rolled_forward"]), r["aborted"], r["freed_bytes"]) for r in before] == [
        ("gpt", 1, [], 0),
        ("wide", 0, [], 0),
    ]
    assert steps(filled, "gpt")[0] == 50
    write_rank(filled, "gpt", fresh, sample_arrays())
    done = succeed("gc", "gpt", "--grace", "0s", "--store", folder)
    assert f"aborted gpt@60.{partial.ulid}" in done.stdout
    assert f"rolled forward gpt@70.{fresh.ulid}" in done.stdout
    row = done.stdout.splitlines()[1].split()
    assert (row[:4], row[5]) == (["gpt", "0", "1", "1"], "MiB")
    assert (list(filled.list(run.keys.attempt(partial))), visible_attempts(run)[0]) == ([], fresh)


def test_without_a_grace_the_space_is_free_at_once(folder: Path, filled: Store) -> None:
    done = invoke("prune", "--keep", 2, "--yes", "--grace", "0s", "--store", folder)
    assert done.stdout.splitlines()[-1] == "Removed 3 checkpoints, freed 6.8 MiB"
    assert len(list(filled.list_folders(RunKeys("gpt").attempts))) == 2


def test_a_deletion_is_seen_and_taken_back(folder: Path, filled: Store) -> None:
    before = list_checkpoints(Run(filled, "gpt"))
    assert invoke("prune", "--keep", 1, "gp*", "--yes", "--store", folder).code == 0
    assert steps(filled, "gpt") == [40]
    waiting = invoke("undelete", "--store", folder, "-o", "json").json
    assert [body["id"] for body in waiting] == [c.id for c in sorted(before[1:], key=lambda c: c.attempt, reverse=True)]
    assert {body["reason"] for body in waiting} == {"prune"}
    assert "23h 59m" in invoke("undelete", "--store", folder).stdout
    done = succeed("undelete", "gpt@10", "--reason", "a mistake", "--store", folder)
    assert done.stdout == f"{before[-1].id} is back, and stays until ckptctl pin gpt@10 undeleted --remove\n"
    assert invoke("prune", "--keep", 1, "--yes", "--store", folder).code == 0
    assert steps(filled, "gpt") == [40, 10]
    again = invoke("undelete", "gpt@10", "--store", folder, "-o", "json")
    assert (again.code, again.error["code"]) == (4, "no_checkpoint")
    log = invoke("audit", "gpt", "--store", folder, "-o", "json").json
    assert [(r["action"], r["reason"], len(r["ids"])) for r in log] == [
        ("undelete", "a mistake", 1), ("pin", "undeleted", 1), ("delete", "prune", 4),
    ]  # fmt: skip
    assert "@" in log[0]["by"]
    assert "undelete" in invoke("audit", "--store", folder).stdout


def test_what_is_swept_does_not_come_back(folder: Path, filled: Store) -> None:
    assert invoke("rm", "gpt@20", "--yes", "--grace", "0s", "--store", folder).code == 0
    done = invoke("undelete", "gpt@20", "--store", folder, "-o", "json")
    assert (done.code, done.error["code"]) == (6, "sweep_begun")
    assert invoke("undelete", "--store", folder, "-o", "json").json == []
    assert invoke("pin", "--store", folder, "-o", "json").json == []
    assert steps(filled, "gpt") == [40, 30, 30, 10]


def test_several_checkpoints_are_deleted_or_none_if_a_name_is_wrong(folder: Path) -> None:
    wrong = invoke("rm", "gpt@10", "gpt@11", "--yes", "--store", folder)
    assert (wrong.code, "step 11" in wrong.stderr) == (4, True)
    assert len(invoke("ls", "gpt", "--store", folder, "-o", "id").stdout.split()) == 5
    assert invoke("pin", "gpt@20", "paper", "--store", folder).code == 0
    part = invoke("rm", "gpt@10", "gpt@20", "gpt@10", "--yes", "--store", folder, "-o", "json")
    assert (part.code, [body["step"] for body in part.json]) == (3, [10])
    assert [body["step"] for body in invoke("ls", "gpt", "--store", folder, "-o", "json").json] == [40, 30, 30, 20]
    both = invoke("rm", "gpt@30", "gpt@20", "--yes", "--store", folder, "-o", "id")
    assert (both.code, both.stdout.partition(".")[0]) == (3, "gpt@30")


def test_a_whole_run_is_deleted_and_comes_back(filled: Store, target: tuple[str, str]) -> None:
    """Also a checkpoint whose chunks others reference: newer ones go first."""
    newest = list_checkpoints(Run(filled, "gpt"))[0]
    write_checkpoint(filled, "gpt", 50, sample_arrays(40), base=newest.attempt)
    wait_until(lambda: "gpt@50" in invoke("ls", "gpt", *target).stdout, "the daemon's notice")
    for wrong in (("gpt",), ("gpt@10", "--all"), ("gpt@7*",), ("other", "--all")):
        assert invoke("rm", *wrong, "--yes", *target).code in (2, 4)
    seen = invoke("rm", "gpt", "--all", "--dry-run", *target, "-o", "id")
    assert [name.split(".")[0] for name in seen.stdout.split()] == [f"gpt@{n}" for n in (50, 40, 30, 30, 20, 10)]
    assert len(steps(filled, "gpt")) == 6
    done = invoke("rm", "gpt", "--all", "--yes", *target)
    assert (done.code, done.stdout.count("deleted gpt@")) == (0, 6), done.stderr
    assert (steps(filled, "gpt"), steps(filled, "wide")) == ([], [5])
    for step in (40, 50):
        assert invoke("undelete", f"gpt@{step}", *target).code == 0
    assert steps(filled, "gpt") == [50, 40]


def test_patterns_of_checkpoints_are_deleted(folder: Path, filled: Store) -> None:
    assert invoke("tag", "gpt@20", "draft", "--store", folder).code == 0
    done = invoke("rm", "gpt@3*", "g*@draft", "--yes", "--store", folder, "-o", "json")
    assert (done.code, [body["step"] for body in done.json]) == (0, [30, 30, 20])
    assert steps(filled, "gpt") == [40, 10]


def test_the_name_of_the_run_is_typed(filled: Store, target: tuple[str, str]) -> None:
    for answer, code, left in (("y", 2, 5), ("gpt", 0, 0)):
        with Terminal("rm", "gpt", "--all", *target, columns=120) as terminal:
            terminal.wait_for("Delete all 5 checkpoints of gpt, 11.4 MiB? Type gpt to confirm: ")
            if answer == "gpt":  # meanwhile, a policy or another hand deletes one of them
                assert invoke("rm", "gpt@20", "--yes", *target).code == 0
            terminal.type(f"{answer}\n")
            assert terminal.finish() == code
        assert len(steps(filled, "gpt")) == left
