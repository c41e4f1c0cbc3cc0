from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from kubernetes_validate import validate  # type: ignore[attr-defined]

from ckpt.saver.presence import parent_of
from ckptctl.commands.fleet import _call
from ckptctl.commands.verify import scrub_checkpoints
from ckptstore.clock import system_clock
from ckptstore.fleet import Part, Unit, UnitResults
from ckptstore.names import UNITS_PREFIX, RunKeys
from ckptstore.retention.scrubbing import verified_at
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import flip, write_checkpoint
from tests.support.command_line import PROGRAM, invoke, succeed
from tests.support.trainers import is_alive
from tests.support.waiting import wait_until

RUNS = ("team-a/one", "team-a/two", "team-b/one")
STEPS = (10, 20, 30)


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """Three runs of three checkpoints. Their ids are random; each of two or of three parts has some of them."""
    for attempt in count():
        store = open_store(str(folder := tmp_path / f"team-{attempt}"))
        ids = [
            write_checkpoint(
                store, run, step, arrays={"model/w": np.full(5000 + step, number, np.float32)}, statistics=True
            ).id
            for number, run in enumerate(RUNS)
            for step in STEPS
        ]
        if all(any(map(Part(number, of).has, ids)) for of in (2, 3) for number in range(1, of + 1)):
            break
    return folder


def sorted_json(found: Any) -> list[str]:
    return sorted(json.dumps(body, sort_keys=True) for body in found)


def units_left(folder: Path) -> list[str]:
    return [info.key for info in open_store(str(folder)).list(UNITS_PREFIX)]


def checkpoint_file(folder: Path, id: str) -> Path:
    run, _, rest = id.partition("@")
    step, _, ulid = rest.partition(".")
    (path,) = folder.glob(f"{RunKeys(run).folder}/attempts/*{int(step):012d}-{ulid}/shard-00000.ckpt")
    return path


@pytest.mark.parametrize("verb", ["verify", "scrub"])
def test_units_find_what_a_serial_run_finds_damage_included(team: Path, verb: str) -> None:
    ids = succeed("ls", "team-a*", "--store", team, "-o", "id").stdout.split()
    flip(checkpoint_file(team, ids[1]), 100)
    serial = invoke("verify", "team-a*", "--store", team, "-o", "json")
    assert serial.code == 5
    done = invoke(verb, "team-a*", "--on", "local:2", "--store", team, "-o", "json")
    assert (done.code, sorted_json(done.json)) == (5, sorted_json(serial.json))
    assert units_left(team) == []
    shown = invoke(verb, "team-a*", "--part", "1/1", "--store", team)
    assert shown.code == (5 if verb == "verify" else 0)  # a scrub leaves out what it found damaged
    assert (ids[1] in shown.stdout) == (verb == "verify")


def test_parts_do_everything_once_and_the_last_one_reports_all(team: Path) -> None:
    ids = set(succeed("ls", "team-*", "--store", team, "-o", "id").stdout.split())
    bodies = []
    for number in (1, 2, 3):
        done = succeed("scrub", "team-*", "--part", f"{number}/3", "--store", team, "-o", "json")
        bodies.append({body["id"] for body in done.json})
        assert ("left, to other parts" in done.stderr) == (number < 3)
    assert bodies[2] == ids  # all of them
    assert all(bodies)
    assert not bodies[0] & bodies[1]
    assert units_left(team) == []


def test_a_part_of_a_job_is_that_of_its_environment(team: Path) -> None:
    by_name = succeed("verify", "team-*", "--part", "2/3", "--store", team, "-o", "json").json
    env = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "3"}
    assert invoke("verify", "team-*", "--part", "auto", "--store", team, "-o", "json", env=env).json == by_name
    assert invoke("verify", "team-*", "--part", "auto", "--store", team).code == 2


def test_a_retry_leaves_out_what_is_done_and_a_failed_unit_is_done_partly(team: Path, tmp_path: Path) -> None:
    there, blocked = tmp_path / "there", tmp_path / "there" / RunKeys("team-a/two").folder
    there.mkdir()
    blocked.write_text("a file in the place of the run's folder")
    call = ("cp", "team-*", "--to", there, "--on", "local:2", "--store", team, "-o", "json")
    done = invoke(*call)
    assert done.code == 3
    assert json.loads(done.stderr.splitlines()[-1])["code"] == "partly_done"
    assert {body["original"].partition("@")[0] for body in done.json} == {"team-a/one", "team-b/one"}
    assert len(units_left(team)) == 2
    blocked.unlink()
    copied = {path: path.stat().st_mtime_ns for path in there.rglob("*.ckpt")}
    again = succeed(*call).json
    assert sorted(body["original"] for body in again) == sorted(
        succeed("ls", "team-*", "--store", team, "-o", "id").stdout.split()
    )
    assert not any(body["existed"] for body in again)  # the results of the first call, not copies that were found
    assert {path: path.stat().st_mtime_ns for path in copied} == copied
    assert units_left(team) == []


def test_a_damaged_result_costs_its_unit(team: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = ("scrub", "team-*", "--store", team, "-o", "json", "--part")
    first = {body["id"] for body in succeed(*call, "1/2").json}
    broken = units_left(team)[0]
    flip(team / broken, 20)
    done = succeed(*call, "2/2")  # has nothing to do with that unit, and leaves it to a repetition
    assert broken in caplog.text
    assert "left, to other parts or to a repetition" in done.stderr
    assert first < {body["id"] for body in succeed(*call, "1/2").json}
    assert units_left(team) == []


def test_exports_are_told_apart_by_their_path(team: Path, tmp_path: Path) -> None:
    to = f"{tmp_path}/out/{{run}}/{{step}}.safetensors"
    done = succeed("export", "team-*@[12]0", "--to", to, "--on", "local:2", "--store", team, "-o", "json").json
    paths = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.safetensors"))
    assert paths == sorted(f"{run}/{step}.safetensors" for run in RUNS for step in (10, 20))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    serial = succeed("export", "team-*@[12]0", "--to", to, "--store", team, "-o", "json").json
    assert sorted_json(serial) == sorted_json(done)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    newest = succeed("export", "team-a*", "--to", to, "--force", "--store", team, "-o", "json").json
    assert [body["id"].split(".")[0] for body in newest] == ["team-a/one@30", "team-a/two@30"]
    wrong = invoke("export", "team-*", "--to", tmp_path / "one.safetensors", "--store", team)
    assert wrong.code == 2
    assert "3 checkpoints are written to 1 place" in wrong.stderr
    assert invoke("export", "team-*@*", "--to", f"{tmp_path}/{{run}}.pt", "--on", "local:1", "--store", team).code == 2


def test_runs_are_pruned_and_shown_by_units(team: Path) -> None:
    serial = succeed("stats", "team-*", "--store", team, "-o", "json").json
    assert sorted_json(
        succeed("stats", "team-*", "--on", "local:2", "--store", team, "-o", "json").json
    ) == sorted_json(serial)
    assert succeed("stats", "team-*", "--store", team).stdout.count("model/w") == len(RUNS)
    call = ("prune", "team-*", "--keep", "1", "--on", "local:2", "--store", team)
    assert succeed(*call, "--dry-run", "-o", "json").json["units"] == 3
    refused = invoke(*call)
    assert refused.code == 3
    assert "--yes" in refused.stderr
    assert len(succeed("ls", "team-*", "--store", team, "-o", "id").stdout.split()) == 9
    succeed(*call, "--yes")
    assert [c["step"] for c in succeed("ls", "team-*", "--store", team, "-o", "json").json] == [30, 30, 30]


def test_a_dry_run_shows_units_bytes_and_an_estimate(team: Path) -> None:
    needed = sum(c["stored_bytes"] for c in succeed("ls", "team-*", "--store", team, "-o", "json").json)
    for verb in ("verify", "scrub"):
        shown = succeed(verb, "team-*", "--dry-run", "--store", team, "-o", "json").json
        assert (shown["units"], shown["targets"], shown["bytes"]) == (3, 9, needed)
    limited = ("scrub", "team-*", "--rate", "10kB", "--dry-run", "--store", team, "-o", "json")
    assert succeed(*limited).json["seconds"] == pytest.approx(needed / 10_000)
    assert succeed(*limited, "--on", "local:4").json["seconds"] == pytest.approx(needed / 10_000)
    assert verified_at(Run(open_store(str(team)), RUNS[0])) == {}
    assert units_left(team) == []


def test_the_rate_holds_for_all_workers_together(team: Path) -> None:
    needed = sum(c["stored_bytes"] for c in succeed("ls", "team-*", "--store", team, "-o", "json").json)
    began = time.monotonic()
    succeed("scrub", "team-*", "--rate", f"{needed / 4000}kB", "--on", "local:3", "--store", team)
    assert time.monotonic() - began >= 4


def test_a_killed_call_continues(team: Path) -> None:
    slow = ("scrub", "team-*", "--rate", "8kB", "--on", "local:1", "--store", str(team))
    with subprocess.Popen([*PROGRAM, *slow]) as call:
        wait_until(lambda: len(units_left(team)) == 1)
        workers = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent_of(int(path.name)) == call.pid]
        call.kill()
    assert workers
    wait_until(lambda: not any(map(is_alive, workers)), "the workers end with the call")
    first = verified_at(Run(open_store(str(team)), RUNS[0]))
    done = succeed("scrub", "team-*", "--on", "local:1", "--store", team, "-o", "json")
    assert len(done.json) == 9
    assert verified_at(Run(open_store(str(team)), RUNS[0])) == first


def test_a_checkpoint_that_is_deleted_meanwhile_takes_no_other_along(team: Path) -> None:
    store = open_store(str(team))
    ids = succeed("ls", RUNS[0], "--store", team, "-o", "id").stdout.split()
    gone = f"{RUNS[0]}@40.01M7Y6P7WGCXV53EY39EPJ6JT8"
    _call(scrub_checkpoints, "which", {}, store.url, "_units/x/", Unit((ids[0], gone, *ids[1:]), 0))
    results = UnitResults(store, "_units/x/").read(system_clock())
    assert {result.targets: len(result.body or ()) for result in results} == {(gone,): 0} | {(id,): 1 for id in ids}
    assert len(verified_at(Run(store, RUNS[0]))) == 3


def test_jobs_of_clusters_are_printed_and_valid(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    script = succeed("scrub", "team-*", "--older", "7d", "--on", "slurm:cpu:32", "--store", team).stdout
    assert "#SBATCH --partition=cpu\n" in script
    assert "#SBATCH --array=1-32\n" in script
    command = shlex.split(script.splitlines()[-1])
    assert command[:5] == ["exec", "ckptctl", "scrub", "team-*", "--older"]
    assert command[-2:] == ["--part", "auto"]
    assert invoke(*command[2:], env={f"SLURM_ARRAY_TASK_{n}": "1" for n in ("ID", "MIN", "COUNT")}).code == 0
    manifest = yaml.safe_load(succeed("verify", "team-*", "--on=k8s:ml", "--dry-run", "--store", team).stdout)
    validate(manifest, "1.31", strict=True)
    assert manifest["spec"]["completions"] == 8
    assert manifest["metadata"]["namespace"] == "ml"
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "0"}
    part = invoke(*container["command"][1:], "-o", "json", env=environment).json
    assert part == invoke("verify", "team-*", "--part", "1/8", "--store", team, "-o", "json").json


def test_a_job_is_submitted_where_the_client_is(team: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "sbatch"
    program.write_text(
        '#!/bin/bash\ncat > "$GIVEN"\n[ -z "$REFUSES" ] || { echo no such partition >&2; exit 1; }\necho job 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("GIVEN", str(tmp_path / "given"))
    call = ("scrub", "team-*", "--on", "slurm:cpu", "--store", team)
    assert succeed(*call).stdout == "job 7\n"
    assert (tmp_path / "given").read_text() == succeed(*call, "--dry-run").stdout
    monkeypatch.setenv("REFUSES", "1")
    refused = invoke(*call)
    assert refused.code == 2
    assert "no such partition" in refused.stderr


def test_a_daemon_has_no_units(target: tuple[str, str]) -> None:
    done = invoke("verify", "gpt", "--part", "1/1", *target)
    assert done.code == (0 if target[0] == "--store" else 2)
