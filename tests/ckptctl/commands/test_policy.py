from pathlib import Path

import pytest
import yaml

from ckptctl.commands.policy import EXAMPLE, parse_policies, write_policies
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Override, Policy, PolicySet
from ckptstore.retention.policy import read_policies
from ckptstore.stores import Store
from tests.support.checkpoints import steps, write_checkpoint
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.waiting import present


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
    assert present(read_policies(filled)).policies == PolicySet()


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
    assert change("w*", "--max-bytes", "1GB", "--keep-abandoned", "0s") == 0
    assert change("--keep-abandoned", "1d") == 2, "nothing of the live lineage would stay"
    found = present(read_policies(filled))
    assert found.policies.default == Policy(keep_last=5, keep_best=("loss:min:3",))
    assert found.policies.overrides == (
        Override(runs="w*", rules=Policy(max_bytes=10**9, keep_abandoned_s=0)),
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
            assert "blocked: the prune would delete 10 of 11 checkpoints of run 'gpt': 91%" in blocked.stderr
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
