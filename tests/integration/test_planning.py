from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.format.records import SAVE_COST, SaveCost
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from examples.train_gpt import CONTEXT, GPT
from tests.support.command_line import invoke

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/planning.md").read_text()
MORE = Path(__file__).with_name("plans.md").read_text()
PRINTED = re.findall(r"^```console\n\$ ckptctl ([^\n]*)\n(.*?)^```$", PAGE + MORE, re.M | re.S)
_ULID = re.compile(r"\.[0-9A-Z]{26}\b")


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    model(tokens, tokens).backward()
    optim.step()
    optim.zero_grad()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a checkpoint of the example's GPT."""
    model = GPT()
    optim = torch.optim.AdamW(model.parameters())
    step(model, optim)
    with Checkpointer(str(tmp_path), run="gpt-small", compress="off", writer="thread") as checkpointer:
        checkpointer.save(model, optim, 1000)
    return tmp_path


def test_the_pages_show_what_is_printed(store: Path) -> None:
    assert len(PRINTED) >= 5
    for command, shown in PRINTED:
        done = invoke(*shlex.split(command), "--store", store)
        assert (done.code, done.stderr) == (0, "")
        assert _ULID.sub("", done.stdout) == shown, command


def keys_of(value: object) -> set[str]:
    """The keys of all objects in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_is_documented() -> None:
    options = "--model mlperf-8b --window 1m --bandwidth 1GB --mtbf 8h --steps 10 --step 1s --keep 1 -o json"
    page = PAGE.partition("## Keys")[2]
    documented = set(re.findall(r"[\w]+", " ".join(line.split("|")[1] for line in page.splitlines() if "|" in line)))
    assert keys_of(invoke("plan", *options.split()).json) - documented == set()


def test_a_run_predicts_the_size_of_its_next_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(width=96, depth=2)
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer(str(tmp_path), run="gpt", compress="fast") as checkpointer:
        for number in range(1, 5):
            step(model, optim)
            checkpointer.save(model, optim, number)
        before = invoke("plan", "--from", "gpt", "--store", tmp_path, "-o", "json").json
        step(model, optim)
        after = checkpointer.save(model, optim, 5)
    assert before["size"]["raw_bytes"] == pytest.approx(after.raw_bytes, rel=0.01)
    assert before["size"]["stored_bytes"] == pytest.approx(after.needed_bytes, rel=0.01)
    assert before["interval"]["durable_source"] == before["interval"]["stall_source"] == "measured"


def test_each_checkpoint_holds_the_cost_of_the_save_before_it(tmp_path: Path) -> None:
    model = GPT(width=96, depth=1)
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer(str(tmp_path), run="gpt") as checkpointer:
        step(model, optim)
        first = checkpointer.save_async(model, optim, 1)
        step(model, optim)
        first.result(60)
        checkpointer.save(model, optim, 2)
    source = StoreSource(open_store(str(tmp_path)))
    newest, oldest = source.checkpoints("gpt")
    assert SAVE_COST not in read_manifest(source, oldest).extensions
    found = read_manifest(source, newest).extensions[SAVE_COST]
    stall_s = first.timings.blocked_s + first.timings.held_s
    assert found == {"step": 1, "stall_s": pytest.approx(stall_s)}
    assert SaveCost(**found).slowdown_s is None
