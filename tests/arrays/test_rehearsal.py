"""`ckptctl rehearse` with programs of JAX, in which it compares checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.command_line import Finished, invoke

EXAMPLE = Path(__file__).parents[2] / "examples/train_jax.py"
RESTORE = "state, start = restore(begin())"


def rehearsed(program: Path, tmp_path: Path, kills: int) -> Finished:
    command = (sys.executable, program, tmp_path / "real")
    return invoke("rehearse", "--kills", kills, "-o", "json", "--", *command)


@pytest.mark.slow
def test_the_example_resumes_exactly(tmp_path: Path) -> None:
    done = rehearsed(EXAMPLE, tmp_path, 2)
    assert (done.code, done.json["exact"], done.json["compared"]) == (0, True, 4), done
    assert max(kill["resumed_from"] for kill in done.json["kills"]) > 0


@pytest.mark.slow
def test_a_key_that_begins_again_is_named(tmp_path: Path) -> None:
    text, program = EXAMPLE.read_text(), tmp_path / "program.py"
    assert RESTORE in text
    program.write_text(text.replace(RESTORE, f'{RESTORE}\n    state["key"] = jax.random.key(1)'))
    # The first kill ends the saver too, maybe before it has committed anything; the second one leaves it to its work.
    done = rehearsed(program, tmp_path, 2)
    assert (done.code, done.json["finding"]["cause"]) == (1, "unknown")
    assert {"state/key", "state/params/out"} <= set(done.json["finding"]["differs"])
