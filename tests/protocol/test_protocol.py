"""The protocol holds in every order of its steps, and each rule that is left out is missed.

The numbers of states are printed (`pytest -s`). CKPTD_PROTOCOL=large explores the large scenarios as well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from tests.protocol.explore import Explored
from tests.protocol.invariants import (
    ALONE,
    BACK,
    DEAD,
    FULL,
    HELD,
    LAST,
    LATEST,
    LISTED,
    RESUMED,
    STAYS,
    WHOLE,
)
from tests.protocol.rules import Rules
from tests.protocol.scenarios import CASES

LARGE = os.environ.get("CKPTD_PROTOCOL") == "large"
EXPLORED = [name for name, case in CASES.items() if LARGE or not case.large]

FOUND = {
    "outcome_is_create_only": ("commit, failing rank", DEAD),
    "abort_before_deleting": ("commit, failing rank", WHOLE),
    "lost_reply_is_read_back": ("commit, failing rank", DEAD),
    "refusal_is_read_back": ("commit, failing rank", STAYS),
    "ends_earlier_saves": ("repeated saves", LAST),
    "reader_looks_after_its_lease": ("wrong clock", LISTED),
    "deleter_looks_after_its_tombstone": ("delete against holds", LISTED),
    "sweeper_looks_for_holds": ("wrong clock", HELD),
    "clock_is_probed": ("wrong clock", HELD),
    "own_tombstone_for_each_deletion": ("two deletions and an undelete", BACK),
    "fate_decides": ("two deletions and an undelete", BACK),
    "withdrawal_needs_fate": ("delete against holds", DEAD),
    "tombstone_before_sweep": ("wrong clock", HELD),
    "tombstone_read_after_fate": ("sleeping sweeper", DEAD),
    "forget_tombstone_before_fate": ("sleeping sweeper", BACK),
    "marks_before_check": ("reference", WHOLE),
    "base_is_checked": ("reference to a zombie", WHOLE),
    "base_may_be_dead": ("reference to a zombie", WHOLE),
    "marks_until_data_is_gone": ("delete a reference", WHOLE),
    "hidden_readers_keep_data": ("delete a reference", WHOLE),
    "numbered_generations": ("generations", LATEST),
    "generation_is_create_only": ("generations", ALONE),
    "dead_are_listed": ("sleeping committer", HELD),
    "aborted_are_listed": ("sleeping committer of an orphan", DEAD),
    "dead_before_tombstone": ("sleeping committer", WHOLE),
    "dead_read_after_create": ("sleeping committer of an orphan", STAYS),
    "dead_read_after_lease": ("sleeping reader", HELD),
    "version_is_create_only": ("forgetters", WHOLE),
    "version_has_the_last_one": ("forgetters", WHOLE),
    "versions_are_listed_again": ("forgetters", WHOLE),
    "resumer_looks_after_its_lease": ("thin against holds", RESUMED),
    "thinned_before_thinning": ("thin against holds", FULL),
    "thinned_read_after_fate": ("two thinnings", BACK),
    "optimizer_marks": ("thin a reference", FULL),
    "base_may_be_thinned": ("thin a reference", FULL),
}
"""For each rule the scenario that shows what happens without it, and the invariant that is violated."""

BEHIND_OTHERS = {
    "tombstones_listed_after_outcomes": ("sleeping committer", HELD, ("dead_read_after_lease",)),
    "dead_read_last": ("sleeping committer", HELD, ("dead_read_after_lease",)),
    "forget_after_data": ("crashed sweep", DEAD, ("dead_are_listed",)),
    "receipts_deleted_first": ("half a deletion", WHOLE, ("dead_are_listed", "forget_after_data")),
}
"""Rules that others cover: a violation needs these others to be left out as well."""


@cache
def explored(name: str, *without: str) -> Explored:
    """All states of a scenario without these rules, or those up to the first violation."""
    return CASES[name].explore(name, replace(Rules(), **dict.fromkeys(without, False)))


@pytest.mark.parametrize("name", EXPLORED)
def test_the_invariants_hold_in_every_state(name: str) -> None:
    found = explored(name)
    print(f"\n{name}: {found.states} states, {found.steps} steps")
    assert found.violation is None, str(found.violation)


@pytest.mark.parametrize("rule", FOUND)
def test_a_rule_that_is_left_out_is_missed(rule: str) -> None:
    name, invariant = FOUND[rule]
    found = explored(name, rule)
    assert found.violation is not None, f"{rule} has no effect in {found.states} states of {name!r}"
    print(f"\nwithout {rule}, {name}: {found.violation}")
    assert found.violation.invariant == invariant


@pytest.mark.parametrize("rule", BEHIND_OTHERS)
def test_a_rule_that_others_cover_is_missed_without_them(rule: str) -> None:
    name, invariant, others = BEHIND_OTHERS[rule]
    assert explored(name, *others).violation is None
    assert explored(name, rule).violation is None
    found = explored(name, *others, rule)
    assert found.violation is not None
    assert found.violation.invariant == invariant


def test_every_rule_is_left_out_once() -> None:
    assert sorted([*FOUND, *BEHIND_OTHERS]) == sorted(field.name for field in fields(Rules))
    assert {invariant for _, invariant in FOUND.values()} == {
        WHOLE, STAYS, HELD, LISTED, BACK, DEAD, ALONE, LAST, LATEST, FULL, RESUMED
    }  # fmt: skip


def test_every_row_is_reached() -> None:
    """A row that no actor reaches proves nothing."""
    reached = {at.partition(": ")[2] for name in EXPLORED for at in explored(name).reached}
    rows = {at for name in EXPLORED for one in CASES[name].actors(Rules()).values() for at in one.rows}
    # The rows of the list of the dead are generated for each set of attempts, possible or not.
    assert {at for at in rows - reached if not at.startswith("add to version")} == set()


MODEL = Path(__file__).with_name("protocol.pml")
MUTANTS = range(1, 7)


def spin(folder: Path, mutant: int = 0) -> tuple[int, int]:
    """Errors and states of an exhaustive search."""
    generate = ["spin", "-a", f"-DMUTANT={mutant}", str(MODEL)]
    build = ["gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c"]
    search = ["./pan", "-m100000", "-w22", "-E"]  # -E: a process that stops is no error
    for command in (generate, build):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    report = subprocess.run(search, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout
    errors = re.search(r"errors: (\d+)", report)
    states = re.search(r"(\S+) states, stored", report)
    assert errors
    assert states
    assert "max search depth too small" not in report
    return int(errors[1]), int(float(states[1]))


@pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="spin or gcc is not installed")
def test_no_order_of_steps_violates_an_invariant(tmp_path: Path) -> None:
    errors, states = spin(tmp_path)
    print(f"\nspin: {states} states")
    assert errors == 0
    assert states > 1000


@pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="spin or gcc is not installed")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_left_out_is_missed_by_spin_too(tmp_path: Path, mutant: int) -> None:
    assert spin(tmp_path, mutant)[0] == 1
