"""What the benchmarks measure with is itself right."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.measuring import (
    Spread,
    core_seconds,
    descendants,
    in_turns,
    memcpy_s,
    raw_read_s,
    raw_write_s,
    rotated,
    sync_tree,
    touched,
    tree_bytes,
    usage,
)
from tests.support.waiting import Lines


def test_contestants_take_turns_and_one_that_fails_is_left_out_with_its_reason() -> None:
    calls: list[str] = []

    def call(name: str, fails_at: int = 10) -> int:
        calls.append(name)
        if calls.count(name) == fails_at:
            raise ValueError("two\nlines")
        return calls.count(name)

    found, problems = in_turns({"a": lambda: call("a"), "b": lambda: call("b", 2), "c": lambda: call("c")}, 3)
    assert found == {"a": [1, 2, 3], "c": [1, 2, 3]}
    assert problems == {"b": "ValueError: two lines"}
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a"]


def test_each_comes_first_once_in_as_many_turns_as_there_are() -> None:
    assert sorted(rotated(["a", "b", "c"], turn)[0] for turn in range(3)) == ["a", "b", "c"]


def test_the_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_processor_time_of_children_counts() -> None:
    with usage() as used:
        subprocess.run([sys.executable, "-c", "import os\nwhile os.times().user < 0.3: pass"], check=True)
    assert 0.25 < used.core_s < 5
    assert used.wall_s >= 0.25


def test_children_are_found_and_counted_while_threads_come_and_go() -> None:
    spend = "import os, sys\nwhile os.times().user < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    over = threading.Event()

    def start_threads() -> None:
        while not over.is_set():
            short = [threading.Thread(target=pow, args=(3, 1000)) for _ in range(8)]
            for thread in short:
                thread.start()
            for thread in short:
                thread.join()

    command = [sys.executable, "-c", spend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert Lines(child.stdout).next() == "\n"
        busy = threading.Thread(target=start_threads)
        busy.start()
        try:
            for _ in range(100):
                before = core_seconds()
                assert child.pid in descendants()
                assert core_seconds() >= before
        finally:
            over.set()
            busy.join()


ROOT = Path(__file__).parents[2]
MEASURED = """
import os
from bench.measuring import memory, touched
with memory() as used:
    shared = touched({size})
    child = os.fork()
    if not child:
        own = touched({size})
        os._exit(int(len(own) + len(shared) != 2 * {size}) if sum(shared[:: 1 << 12]) else 1)
    assert os.waitpid(child, 0)[1] == 0
print(used.extra_bytes)
"""


def test_memory_of_this_process_and_of_children_counts_and_what_they_share_counts_once() -> None:
    # In a process of its own: forking one with a large heap copies what the collector of the child visits.
    size = 64 << 20
    script = [sys.executable, "-c", MEASURED.format(size=size)]
    extra_bytes = int(subprocess.run(script, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert size <= extra_bytes < 2.9 * size


@pytest.mark.parametrize("threads", [1, 3])
def test_bare_writes_and_reads_move_all_bytes(threads: int, tmp_path: Path) -> None:
    size = (20 << 20) + 12345
    source, target = touched(size), touched(size)
    target[:] = bytes(len(target))
    assert raw_write_s(tmp_path / "raw", size, source, threads) > 0
    assert (tmp_path / "raw").read_bytes() == source[:size]
    assert raw_read_s(tmp_path / "raw", target, threads) > 0
    assert target[:size] == source[:size]
    sync_tree(tmp_path)
    assert tree_bytes(tmp_path) == size


def test_memcpy_copies() -> None:
    source, target = touched(1 << 20), touched(1 << 20)
    target[:] = bytes(len(target))
    assert memcpy_s(1 << 20, target, source) > 0
    assert target[:] == source[:]
