"""What people typically type wrong. Each message names the cause, and the hint the remedy."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command_line import Finished, invoke


@dataclass(frozen=True)
class Mistake:
    """A command line, and what its error must contain. {folder}, {file} and {port} are replaced."""

    typed: str
    code: int
    cause: str
    remedy: str
    store: bool = True


MISTAKES = [
    # Words
    Mistake("list-all", 2, "there is no command 'list-all'", "ckptctl --help"),
    Mistake("restore gpt", 2, "there is no command 'restore'", "ckptctl export"),
    Mistake("download gpt", 2, "there is no command 'download'", "ckptctl export"),
    Mistake("remove gpt@10", 2, "there is no command 'remove'", "ckptctl rm"),
    Mistake("forget --keep 3", 2, "there is no command 'forget'", "ckptctl prune"),
    Mistake("check gpt@10", 2, "there is no command 'check'", "ckptctl verify"),
    Mistake("shw gpt", 2, "there is no command 'shw'", "ckptctl show"),
    Mistake("ls --run gpt", 2, "--run", "ckptctl ls RUN"),
    Mistake("ls --limt 3", 2, "--limt", "--limit"),
    # Names
    Mistake("ls gtp", 4, "run 'gtp' has no checkpoint", "ckptctl runs"),
    Mistake("ls 'exp-*'", 4, "'exp-*' has no checkpoint", "ckptctl runs"),
    Mistake("latest", 2, "several: gpt, wide", "Name the run"),
    Mistake("show gpt@11", 4, "no checkpoint at step 11", "ckptctl ls"),
    Mistake("show gpt/10", 2, "'gpt/10'", "letters"),
    Mistake("show gpt@ten", 2, "'gpt@ten' is not a checkpoint id", "RUN@STEP"),
    Mistake("rm gpt --yes", 2, "'gpt' names a run", "ckptctl rm gpt@STEP"),
    # Values
    Mistake("ls gpt --metric loss=0.1", 2, "'loss=0.1' is not a metric filter", "NAME<=NUMBER"),
    Mistake("ls gpt --since yesterday", 2, "'yesterday' is not a time", "24h"),
    Mistake("ls gpt --sort loss", 2, "'loss' is not an order", "metric:NAME"),
    Mistake("prune gpt --keep 3 --grace 1 --yes", 2, "'1' is not a duration", "24h"),
    Mistake("tag gpt@10 --metric loss=low", 2, "'loss=low' is not a metric", "NAME=NUMBER"),
    # Deleting
    Mistake("prune gpt --keep 1", 2, "there is no terminal to confirm at", "--yes"),
    Mistake("rm gpt@40 --yes", 6, "newest", "--force"),
    Mistake("verify", 2, "nothing to verify", "--all"),
    # Files
    Mistake("export gpt@40 --to {folder}/x.bin", 2, "x.bin", "--format"),
    Mistake("import {folder}/none.pt r@1", 2, "none.pt does not exist", "Pass a file or folder"),
    Mistake("cp gpt@40", 2, "no store to copy to is given", "--to STORE"),
    # Targets
    Mistake("ls", 2, "neither a daemon nor a store is set", "--store", store=False),
    Mistake("ls --store /mnt/not-there", 7, "there is no folder /mnt/not-there", "mounted", store=False),
    Mistake("ls --url {folder}", 2, "is not the URL of a daemon", "--store for a store", store=False),
    Mistake("ls --url http://127.0.0.1:{port}", 7, "did not respond", "Check that it runs", store=False),
]


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def attempt(mistake: Mistake, folder: Path, port: int) -> Finished:
    words = mistake.typed.replace("'", "").format(folder=folder, port=port).split()
    return invoke(*words, env={"CKPT_STORE": str(folder)} if mistake.store else {})


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_is_answered_with_its_cause_and_its_remedy(mistake: Mistake, folder: Path, port: int) -> None:
    before = sorted(os.listdir(folder))
    done = attempt(mistake, folder, port)
    assert done.code == mistake.code
    assert done.stderr.startswith("error: ")
    assert mistake.cause in done.stderr
    assert mistake.remedy in done.stderr
    assert ".." not in done.stderr.replace("'..'", "").replace("...", "")
    assert sorted(os.listdir(folder)) == before


def test_there_are_31_of_them() -> None:
    assert len(MISTAKES) == 31
