from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from ckptctl.commands.policy import EXAMPLE, parse_policies, write_policies
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Override, Policy, PolicySet
from ckptstore.names import RunKeys
from ckptstore.retention.policy import read_policies
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import steps, write_checkpoint
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon


def test_a_file_comes_back_as_it_was() -> None:
    policies = parse_policies(EXAMPLE)
    assert policies.grace_s == 86400
    assert policies.overrides[0].rules is not None
    assert (policies.overrides[0].rules.keep_within_s, policies.overrides[0].rules.max_bytes) == (43200, 500 * 10**9)
    assert (parse_policies(write_policies(policies)), parse_policies("{}")) == (policies, PolicySet())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", "default: 5", "default: {}", "default: {keep_lsat: 5}", "default: {keep_last: 1.5}", "a: [", "\x00",
     "default: {keep_best: [loss]}", "overrides: [{rules: null}]", "max_delete_fraction: 2", "[" * 1000],
)  # fmt: skip
def test_files_that_hold_no_policies(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_policies(text)


def test_policies_are_applied_shown_and_kept(filled: Store, target: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("default: {keep_last: 2}\noverrides: [{runs: 'w*', rules: null}]\ngrace: 1h\n")
    assert invoke("prune", "--yes", *target).code == 2, "there are none yet"
    assert "nothing is pruned" in invoke("policy", "show", *target).stderr
    done = invoke("policy", "apply", file, "--reason", "space", *target)
    assert (done.code, done.stdout) == (0, "policies, version 1, are in force\n")
    shown = invoke("policy", "show", *target).stdout
    assert parse_policies(shown) == parse_policies(file.read_text())
    assert yaml.safe_load(invoke("policy", "show", "gpt", *target).stdout)["default"] == {"keep_last": 2}
    assert invoke("policy", "show", "wide", *target).stdout == "run wide is never pruned\n"
    assert invoke("policy", "apply", file, "--expect", 0, *target).code == 6
    assert invoke("policy", "clear", *target).code == 0
    history = invoke("policy", "history", *target, "-o", "json").json
    assert [(version["version"], version["reason"]) for version in history] == [(2, ""), (1, "space")]
    assert "keep_last=2" in invoke("policy", "history", *target).stdout
    assert read_policies(filled).policies == PolicySet()


def test_a_prune_without_rules_follows_the_policies(folder: Path, filled: Store, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("default: {keep_last: 1}\noverrides: [{runs: 'w*', rules: null}]\ngrace: 1h\n")
    for step in (*range(100, 106), *range(200, 203)):
        write_checkpoint(filled, "gpt" if step < 200 else "small", step)
    invoke("policy", "apply", file, "--store", folder)
    refused = invoke("prune", "--yes", "--store", folder, "-o", "json")
    assert (refused.code, refused.error["code"]) == (6, "too_much_to_delete"), (
        "half of a run is the policies' own limit"
    )
    assert steps(filled, "small") == [202], "small runs have no such limit, and other runs are pruned"
    done = invoke("prune", "--yes", "--force", "--store", folder, "-o", "json").json
    assert (done["grace_s"], steps(filled, "gpt")) == (3600, [105])
    assert invoke("audit", "--store", folder, "-o", "json").json[0]["reason"] == "policies, version 1"


def test_rules_are_set_one_by_one(folder: Path, filled: Store) -> None:
    def change(*args: object) -> int:
        return invoke("policy", "set", *args, "--store", folder).code

    assert change() == 2, "no rule"
    assert change("--keep", 0) == 2, "nothing would stay"
    assert change("--keep", 5, "--keep-best", "loss:min:3", "--reason", "space") == 0
    assert (change("w*", "--keep-within", "12h"), change("wide", "--keep-every", 1000)) == (0, 0)
    assert change("w*", "--max-bytes", "1GB", "--keep", 2, "--keep-abandoned", "0s") == 0
    assert change("--keep-abandoned", "1d") == 2, "nothing of the live lineage would stay"
    found = read_policies(filled)
    assert found.policies.default == Policy(keep_last=5, keep_best=("loss:min:3",))
    assert found.policies.overrides == (
        Override(runs="w*", rules=Policy(keep_last=2, keep_abandoned_s=0), max_bytes=10**9),
        Override(runs="wide", rules=Policy(keep_every=1000)),
    )
    history = invoke("policy", "history", "--store", folder, "-o", "json").json
    assert [version["reason"] for version in history] == ["", "", "", "space"]
    shown = invoke("policy", "show", "--store", folder).stdout
    assert parse_policies(shown) == found.policies
    assert shown.count("keep_abandoned") == 1, "where it is not the default"


def test_what_policies_delete_and_where_they_are_blocked_is_noted(folder: Path, filled: Store) -> None:
    for step in range(100, 106):
        write_checkpoint(filled, "gpt", step)
    with running_daemon(folder.as_uri()) as daemon:
        for target in (("--store", folder), ("--url", daemon.url)):
            blocked = succeed("policy", "set", "--keep", 1, *target)
            assert "blocked: the prune would delete or thin 10 of 11 checkpoints of run 'gpt': 91%" in blocked.stderr
            assert "ckptctl prune gpt" in blocked.stderr
            assert invoke("policy", "clear", *target).stderr == ""
    for number in range(5):
        for step in range(3):
            write_checkpoint(filled, f"sweep-{number}", step)
    several = invoke("policy", "set", "--keep", 1, "--store", folder)
    assert "run sweep-0: 2 checkpoints will be deleted" in several.stderr
    assert "and 2 runs more likewise" in several.stderr
    assert invoke("policy", "show", "--store", folder).stderr == several.stderr
    allowed = invoke("policy", "set", "--keep", 10, "--store", folder)
    assert "run gpt: 1 checkpoint will be deleted" in allowed.stderr


def sizes(folder: Path) -> dict[str, list[int]]:
    """The steps of each run that are listed."""
    found: dict[str, list[int]] = {}
    for body in succeed("ls", "team/*", "--store", folder, "-o", "json").json:
        found.setdefault(body["run"], []).append(body["step"])
    return found


@pytest.fixture
def team(tmp_path: Path) -> tuple[Path, int]:
    """Two runs with three checkpoints each, saved in turn, and the stored bytes of one of them."""
    store = open_store(str(tmp_path / "team"))
    array = np.arange(1000, dtype=np.float32)
    made = [
        write_checkpoint(store, f"team/{run}", step, arrays={"model/w": array}) for step in (1, 2, 3) for run in "ab"
    ]
    for number, one in enumerate(made):
        path = tmp_path / "team" / RunKeys(one.run).outcome(one.attempt)
        os.utime(path, times=(1e9 + number, 1e9 + number))
    return tmp_path / "team", max(one.stored_bytes for one in made)


def test_a_limit_of_a_pattern_holds_for_all_its_runs_together(team: tuple[Path, int]) -> None:
    folder, size = team
    shown = succeed("policy", "set", "team/*", "--keep", 3, "--max-bytes", f"{3.5 * size / 1000}kB", "--store", folder)
    assert "team/*: " in shown.stderr
    assert " are used" in shown.stderr
    assert sizes(folder) == {"team/a": [3, 2, 1], "team/b": [3, 2, 1]}
    plan = succeed("prune", "team/*", "--dry-run", "--store", folder, "-o", "json").json
    gone = {item["checkpoint"]["id"].partition(".")[0] for item in plan["items"] if not item["reasons"]}
    assert gone == {"team/a@1", "team/b@1", "team/a@2"}
    one = succeed("prune", "team/a", "--dry-run", "--store", folder, "-o", "json").json
    assert all(item["reasons"] for item in one["items"])  # the limit needs all of them
    succeed("prune", "--yes", "--store", folder)
    assert sizes(folder) == {"team/a": [3], "team/b": [3, 2]}
    succeed("policy", "set", "team/*", "--keep", 3, "--max-bytes", "1kB", "--store", folder)
    succeed("prune", "--yes", "--store", folder)
    assert sizes(folder) == {"team/a": [3], "team/b": [3]}  # the newest of each run stays
    again = succeed("policy", "show", "--store", folder).stdout
    assert yaml.safe_load(again)["overrides"] == [{"runs": "team/*", "rules": {"keep_last": 3}, "max_bytes": 1000}]


def test_a_limit_without_rules_deletes_nothing_and_refuses_copies_and_imports(
    team: tuple[Path, int], folder: Path, tmp_path: Path
) -> None:
    there, size = team
    succeed("policy", "set", "team/*", "--max-bytes", f"{7 * size / 1000}kB", "--store", there)
    assert invoke("prune", "--yes", "--store", there).code == 0
    assert sizes(there) == {"team/a": [3, 2, 1], "team/b": [3, 2, 1]}
    succeed("cp", "team/a@3", "--to", there, "--as", "other", "--store", there)  # of another run
    more = write_checkpoint(open_store(str(folder)), "team/c", 1, arrays={"model/w": np.arange(4000, dtype=np.float32)})
    refused = invoke("cp", "team/c", "--to", there, "--store", folder, "-o", "json")
    assert (refused.code, refused.error["code"]) == (7, "store_full")
    assert "team/* may have" in refused.error["message"]
    assert more.run not in sizes(there)
    save_file({"w": np.arange(4000, dtype=np.float32)}, tmp_path / "w.safetensors")
    assert invoke("import", tmp_path / "w.safetensors", "team/d@0", "--store", there).code == 7
    succeed("import", tmp_path / "w.safetensors", "free@0", "--store", there)
