import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import yaml

from ckptapi.bodies import CheckpointBody
from ckptctl.commands import listing
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.names import new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import Terminal, invoke, succeed
from tests.support.daemons import Daemon


def test_ls_lists_the_newest_step_first_and_marks_superseded_ones(folder: Path) -> None:
    header, *rows = invoke("ls", "*", "--store", folder).stdout.splitlines()
    assert " ".join(header.split()) == "CHECKPOINT STATE AGE SIZE STORED SAVED IN RANKS METRICS"
    assert [row.split()[0].partition(".")[0] for row in rows] == [
        "gpt@40", "gpt@30", "gpt@30", "gpt@20", "gpt@10", "wide@5",
    ]  # fmt: skip
    assert [row.split()[1] for row in rows] == ["committed"] * 2 + ["superseded"] + ["committed"] * 3
    for which, steps in (("gpt@20", "20"), ("gpt@latest", "40"), ("gpt@1*", "10"), ("*@4?", "40")):
        listed = invoke("ls", which, "--store", folder, "-o", "json").json
        assert [str(one["step"]) for one in listed] == steps.split()
    assert invoke("ls", "gpt@99", "--store", folder).code == 4
    assert rows[0].split()[2:] == ["3h", "00m", "2.7", "MiB", "2.3", "MiB", "0.5s", "1", "loss=0.025"]


def test_every_name_in_a_listing_names_that_checkpoint_again(folder: Path, filled: Store) -> None:
    ids = invoke("ls", "*", "--store", folder, "-o", "id").stdout.split()
    shown = [row.split()[0] for row in invoke("ls", "*", "--store", folder).stdout.splitlines()[1:]]
    assert [invoke("show", "--store", folder, "-o", "id", name).stdout.strip() for name in shown] == ids
    assert ids == [c.id for run in ("gpt", "wide") for c in list_checkpoints(Run(filled, run))]


def test_ls_limits_each_run_and_reports_what_is_missing(folder: Path) -> None:
    done = invoke("ls", "--store", folder, "--limit", 2, "-o", "id")
    assert [line.partition(".")[0] for line in done.stdout.split()] == ["gpt@40", "gpt@30", "wide@5"]
    assert "2 of 5 checkpoints of run gpt shown" in done.stderr
    assert invoke("ls", "--store", folder, "--limit", 2, "-o", "id", "-q").stderr == ""


def test_without_a_run_ls_lists_the_runs(folder: Path) -> None:
    at = ("--store", folder, "-o", "json")
    assert succeed("ls", *at).json == succeed("runs", *at).json == succeed("runs", "*", *at).json
    assert succeed("ls", "--max-step", 0, *at).json == []
    assert [body["run"] for body in succeed("runs", "w*", *at).json] == ["wide"]
    limited = succeed("runs", "--limit", 1, *at)
    assert ([body["run"] for body in limited.json], limited.stderr) == (["gpt"], "1 of 2 runs shown\n")
    assert invoke("runs", "typo", *at).code == 4
    succeed("tag", "wide@latest", "archived", *at)
    left = succeed("runs", *at)
    assert ([body["run"] for body in left.json], "1 archived run;" in left.stderr) == (["gpt"], True)
    assert [body["run"] for body in succeed("runs", "*", *at).json] == ["gpt", "wide"]


def test_a_table_has_a_limit_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MOST_ROWS", 2)
    shown = succeed("ls", "gpt", "--store", folder)
    assert (len(shown.stdout.splitlines()), "2 of 5 checkpoints shown" in shown.stderr) == (3, True)
    assert len(succeed("ls", "gpt", "--store", folder, "--limit", 4).stdout.splitlines()) == 5
    assert len(succeed("ls", "gpt", "--store", folder, "-o", "json").json) == 5


def test_json_equals_the_daemons_answer(folder: Path, filled: Store) -> None:
    expected = [msgspec.to_builtins(CheckpointBody.of(c)) for c in list_checkpoints(Run(filled, "gpt"))]
    assert invoke("ls", "--store", folder, "gpt", "-o", "json").json == expected
    lines = invoke("ls", "--store", folder, "gpt", "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert invoke("latest", "--store", folder, "gpt", "-o", "json").json == expected[0]


def test_latest_is_the_highest_step_of_a_run_which_must_be_named_unless_it_is_the_only_one(folder: Path) -> None:
    done = invoke("latest", "--store", folder, "-o", "json")
    assert (done.code, done.stdout, done.error["code"]) == (2, "", "invalid_request")
    assert "gpt, wide" in done.error["message"]
    shutil.move(folder / "wide", folder.parent)
    assert invoke("latest", "--store", folder, "-o", "id").stdout.startswith("gpt@40.")
    assert invoke("latest", "--store", folder, "gpt", "-o", "id").stdout.startswith("gpt@40.")
    shown = invoke("latest", "--store", folder, "gpt").stdout
    assert "2.7 MiB, 2.3 MiB stored (83%)" in shown
    assert "UTC, 3h 00m ago; 0.5s after its capture" in shown
    assert "5 entries in 1 shard, written by 1 rank" in shown


def test_runs_are_summed_up(folder: Path) -> None:
    rows = [line.split() for line in invoke("runs", "--store", folder).stdout.splitlines()]
    assert rows[1][:2] + rows[1][4:6] == ["gpt", "5", "step", "40"]
    assert rows[2][:2] + rows[2][4:6] == ["wide", "1", "step", "5"]
    assert invoke("runs", "--store", folder, "-o", "id").stdout == "gpt\nwide\n"
    assert [run["num_checkpoints"] for run in invoke("runs", "--store", folder, "-o", "json").json] == [5, 1]


def test_nothing_to_list_is_no_error_but_a_run_that_is_named_must_exist(tmp_path: Path) -> None:
    done = invoke("ls", "--store", tmp_path, "-o", "json")
    assert (done.code, done.json) == (0, [])
    assert "no run in file://" in done.stderr
    assert invoke("runs", "--store", tmp_path).code == 0
    for args in (("ls", "gpt"), ("latest",), ("latest", "gpt"), ("show", "gpt@1")):
        done = invoke(*args, "--store", tmp_path, "-o", "json")
        assert (done.code, done.stdout, done.error["code"]) == (4, "", "no_checkpoint")


def test_a_corrupt_outcome_is_listed_never_latest_and_cannot_be_shown(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    newest = list_checkpoints(run)[0]
    (folder / run.keys.outcome(newest.attempt)).write_bytes(b"{}")
    row = invoke("ls", "--store", folder, "gpt").stdout.splitlines()[1]
    assert row.startswith(f"{newest.id}  corrupt ")
    assert "does not match its checksum" in row
    assert invoke("latest", "--store", folder, "gpt", "-o", "id").stdout.startswith("gpt@30.")
    done = invoke("show", newest.id, "--store", folder, "-o", "json")
    assert (done.code, done.error["code"]) == (5, "corrupt")


def test_show_tells_entries_shards_and_metrics(folder: Path) -> None:
    shown = invoke("show", "gpt@40", "--store", folder).stdout
    assert "metrics     loss=0.025" in shown
    assert "model/weight  float32  700 × 1024  2.7 MiB" in shown
    assert "model/empty   float32  0 × 3           0 B" in shown
    assert "model/scalar  int32    scalar          4 B" in shown
    assert "shard-00000.ckpt     0      14  2.7 MiB  2.3 MiB     1.00  float-split/float16, " in shown
    body = invoke("show", "gpt@40", "--store", folder, "-o", "json").json
    weight = next(entry for entry in body["entries"] if entry["name"] == "model/weight")
    assert weight == {
        "name": "model/weight", "dtype": "float32", "shape": [700, 1024], "bytes": 700 * 1024 * 4, "derived_bytes": 0,
        "aliases": [],
    }  # fmt: skip
    assert (body["checkpoint"]["step"], body["shards"][0]["num_chunks"], body["items"]) == (40, 14, ["model"])


def test_show_selects_entries_if_there_are_any(folder: Path, filled: Store) -> None:
    body = invoke("show", "gpt@latest", "--entries", "model/s*", "--store", folder, "-o", "json").json
    assert [entry["name"] for entry in body["entries"]] == ["model/scalar"]
    done = invoke("show", "gpt@latest", "--entries", "nothing*", "--store", folder)
    assert (done.code, done.stdout) == (2, "")
    write_checkpoint(filled, "bare", 1, arrays={})
    assert "0 entries in 0 shards" in succeed("show", "bare@1", "--store", folder).stdout


def test_branches_are_shown_where_a_run_has_some(folder: Path, filled: Store) -> None:
    assert "GENERATION" not in invoke("ls", "*", "--store", folder).stdout
    run = Run(filled, "wide")
    parent = list_checkpoints(run)[0].attempt
    for resumed_from, steps in ((parent, (20, 30)), (None, (7,)), (parent, (6,))):
        number = begin_generation(run, Session(new_ulid(system_clock()), resumed_from)).number
        for step in steps:
            write_checkpoint(filled, "wide", step, generation=number)
    shown = invoke("ls", "wide", "--store", folder).stdout.splitlines()
    at = shown[0].index("GENERATION")
    assert [row[at:].split("  ")[0] for row in shown[1:]] == [
        "3, from step 5", "2", "1, from step 5", "1, from step 5", "0",
    ]  # fmt: skip
    assert [row.split()[1] for row in shown[1:]] == ["committed", "abandoned", "abandoned", "abandoned", "committed"]
    for step, line in ((6, "3, from step 5; live"), (20, "1, from step 5; abandoned"), (5, "0; live")):
        assert f"generation {line}" in " ".join(invoke("show", f"wide@{step}", "--store", folder).stdout.split())
    found = invoke("ls", "wide", "--store", folder, "-o", "json").json
    assert [body["generation"] for body in found] == [3, 2, 1, 1, 0]
    assert [body["abandoned_at"] is None for body in found] == [True, False, False, False, True]
    assert {body["parent"] for body in found} == {str(parent), None}


def test_conditions_and_orders_are_those_of_the_daemon(folder: Path, daemon: Daemon) -> None:
    for options, query in (
        ("--metric loss<=0.04", "metric=loss%3C%3D0.04"), ("--state superseded", "state=superseded"),
        ("--metric loss>=0.03 --metric loss<=0.06", "metric=loss%3E%3D0.03&metric=loss%3C%3D0.06"),
        ("--min-step 20 --max-step 30", "min_step=20&max_step=30"), ("g* --sort step", "run=g*&sort=step"),
        ("--sort -time", "sort=-committed_at"), ("--sort size", "sort=stored_bytes"),
        ("--sort -size", "sort=-stored_bytes"),
    ):  # fmt: skip
        expected = [body["id"] for body in daemon.get(f"/v1/checkpoints?{query}").json()["items"]]
        for target in (("--store", folder), ("--url", daemon.url)):
            assert invoke("ls", *options.split(), *target, "-o", "id").stdout.split() == expected, options


def test_times_are_ages_or_moments(folder: Path) -> None:
    def steps(*options: str) -> list[int]:
        return [body["step"] for body in invoke("ls", "gpt", *options, "--store", folder, "-o", "json").json]

    assert (steps("--since", "4h"), steps("--until", "4h")) == ([40], [30, 30, 20, 10])
    (moment,) = [
        datetime.fromtimestamp(body["committed_at"] - 0.001, UTC).isoformat()
        for body in invoke("ls", "gpt", "--state", "superseded", "--store", folder, "-o", "json").json
    ]
    assert steps("--since", moment) == [40, 30, 30]
    assert steps("--since", moment.replace("+00:00", "Z")) == [40, 30, 30]


def test_the_best_by_a_metric(folder: Path) -> None:
    best = invoke("ls", "--sort", "metric:loss", "--limit", 2, "--store", folder, "-o", "json").json
    assert [body["step"] for body in best] == [40, 30]
    worst = invoke("ls", "--sort", "-metric:loss", "--store", folder, "-o", "json").json
    assert [body["step"] for body in worst] == [10, 20, 30, 30, 40, 5], "without the metric comes last"
    none = invoke("ls", "--metric", "loss<=0", "--store", folder)
    assert (none.code, "meets all conditions" in none.stderr) == (0, True)


def test_yaml_says_what_json_says(folder: Path) -> None:
    for args in (("ls",), ("show", "gpt"), ("runs",), ("latest", "gpt"), ("policy", "show")):
        shown = invoke(*args, "--store", folder, "-o", "yaml").stdout
        assert yaml.safe_load(shown) == invoke(*args, "--store", folder, "-o", "json").json
    failed = invoke("ls", "typo", "--store", folder, "-o", "yaml")
    assert yaml.safe_load(failed.stderr)["code"] == "no_checkpoint"


def test_ls_is_redrawn_until_it_is_interrupted(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    write_checkpoint(store, "gpt", 1)
    with Terminal("ls", "gpt*", "--watch", "--limit", 1, "--store", store.url) as terminal:
        terminal.wait_for("gpt@1")
        write_checkpoint(store, "gpt", 2)
        terminal.wait_for("gpt@2")
        terminal.wait_for("1 of 2 checkpoints of run gpt shown")
        terminal.interrupt()
        assert terminal.finish() == 130
    for args in ((), ("-o", "json")):
        refused = invoke("ls", "--watch", "--store", store.url, *args)
        assert (refused.code, "ckptctl watch" in refused.stderr) == (2, True)


def test_names_from_kubectl_work(folder: Path) -> None:
    for alias, command in (("list", "ls"), ("get", "ls"), ("describe gpt", "show gpt")):
        shown = invoke(*alias.split(), "--store", folder, "-o", "json")
        assert (shown.code, shown) == (0, invoke(*command.split(), "--store", folder, "-o", "json"))
    assert invoke("delete", "gpt@10", "--yes", "--store", folder).code == 0
    assert "\n  delete" not in invoke("--help").stdout.replace("\n  deleted", "")
