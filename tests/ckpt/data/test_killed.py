"""A job with a resumable loader is killed with SIGKILL in mid-epoch and started again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.command_line import invoke
from tests.support.jobs import Job, kept, killed_and_resumed

_JOB = "tests.ckpt.data.killed"


@pytest.mark.parametrize(
    ("world_size", "num_workers", "at", "resumes"), [(1, 0, 16, 15), (1, 2, 7, 6), (2, 0, 10, 9), (2, 2, 10, 9)]
)
def test_every_later_loss_and_the_weights_are_equal(
    tmp_path: Path, world_size: int, num_workers: int, at: int, resumes: int
) -> None:
    """Of 22 samples in batches of 2: epochs of 11 or 6 steps."""
    with Job(_JOB, [str(tmp_path / "whole"), str(num_workers)], world_size) as job:
        whole = job.finish()
    store = tmp_path / "killed"
    resumed, lines = killed_and_resumed(_JOB, [str(store), str(num_workers)], world_size, at, ranks=world_size)
    assert resumed == resumes
    assert sorted(lines) == sorted(whole)
    assert invoke("verify", "killed@latest", "--store", store).code == 0


def test_each_sample_once_when_the_number_of_killed_ranks_changes(tmp_path: Path) -> None:
    """60 samples: two ranks take 12 of them and are killed, three take 18, and one takes the rest."""
    arguments, environment = [str(tmp_path), "0"], {"SAMPLES": "60"}
    lines: list[list[str]] = []
    for world_size, at, resumes in ((2, 4, 0), (3, 7, 3), (1, 23, 6)):
        with Job(_JOB, arguments, world_size, environment) as job:
            found = job.until(at, world_size)
        resumed = next((int(words[1]) for words in found if words[0] == "resumed"), 0)
        assert resumed == resumes
        lines = [*kept(lines, resumed), *found]
    steps = [words for words in lines if words[0] == "step" and words[4] == "0"]
    assert {int(words[1]) for words in steps} == {0, 1, 2}
    assert Counter(int(number) for words in steps for number in words[5].split(",")) == Counter(range(60))
