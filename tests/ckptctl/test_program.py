"""The program as people and scripts meet it: a process, exit codes, pipes, a terminal, Ctrl-C."""

import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptstore.commits.catalog import Checkpoint, latest, list_checkpoints
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.format import planning
from ckptstore.format.planning import entry_bytes, plan_reads
from ckptstore.names import RunKeys
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import ObjectReader, RangeReader, Store, open_store
from tests.conftest import S3Location
from tests.support.checkpoints import whole_entries, write_checkpoint
from tests.support.command_line import PROGRAM, Terminal, clean_environment, run, run_program


def test_exit_codes(folder: Path, filled: Store, tmp_path: Path) -> None:
    newest = list_checkpoints(Run(filled, "gpt"))[0]
    store = ("--store", folder)
    assert run_program("ls", *store).code == 0
    assert run("export", "gpt@40", "--to", tmp_path / "x.bin", *store).code == 2
    assert run("prune", "--keep", "1", *store).code == 2
    assert run("latest", "typo", *store).code == 4
    assert run_program("ls", "--url", "http://127.0.0.1:1").code == 7
    shard = folder / RunKeys("gpt").shard(newest.attempt, "shard-00000.ckpt")
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    assert run("verify", "--all", *store).code == 5


def test_results_go_to_stdout_and_the_rest_to_stderr(folder: Path) -> None:
    done = run_program("ls", "typo", "-o", "json", "--store", folder)
    assert (done.stdout, done.error["code"]) == ("", "no_checkpoint")
    assert done.error["hint"]
    done = run("ls", "typo", "--store", folder)
    assert done.stdout == ""
    assert done.stderr.startswith("error: run 'typo' has no checkpoint in file://")
    assert "\x1b" not in done.stderr
    done = run("verify", "--all", "-o", "json", "--store", folder)
    assert (len(done.json), done.stderr) == (6, "")


def test_a_pipe_is_not_shortened_unless_it_has_a_width(folder: Path) -> None:
    assert "METRICS" in run("ls", "--store", folder).stdout
    assert max(map(len, run("ls", "--store", folder, env={"COLUMNS": "64"}).stdout.splitlines())) <= 64


def test_a_reader_that_has_seen_enough_is_no_error_message(folder: Path, filled: Store) -> None:
    many = {f"model/{i}": np.zeros((1,), dtype=np.int8) for i in range(5000)}
    write_checkpoint(filled, "many", 1, arrays=many)
    process = subprocess.Popen(
        [*PROGRAM, "show", "many@1", "--store", str(folder)],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout as out, process.stderr as err:
        out.readline()
        out.close()
        assert err.read() == b""
        assert process.wait(60) == 1


def test_prune_asks_and_obeys(folder: Path, filled: Store) -> None:
    run = Run(filled, "gpt")
    for answer in ("n", "", "whatever"):
        with Terminal("prune", "--keep", "1", "--store", folder, columns=120) as terminal:
            terminal.wait_for("Delete 4 checkpoints, 9.1 MiB, freed after 24h 00m? [y/N] ")
            assert "Keep 2 checkpoints" in terminal.screen
            terminal.type(f"{answer}\n")
            assert terminal.finish() == 2
            assert "nothing was deleted" in terminal.screen
    assert len(list_checkpoints(run)) == 5
    with Terminal("prune", "--keep", "1", "--store", folder, columns=120) as terminal:
        terminal.wait_for("[y/N] ")
        terminal.type("y\n")
        assert terminal.finish() == 0
        assert "Hid 4 checkpoints; 9.1 MiB are freed in 24h 00m" in terminal.screen
    assert [c.step for c in list_checkpoints(run)] == [40]


def test_ctrl_c_and_ctrl_d_at_the_question_delete_nothing(folder: Path, filled: Store) -> None:
    with Terminal("prune", "--keep", "1", "--store", folder, columns=120) as terminal:
        terminal.wait_for("[y/N] ")
        terminal.interrupt()
        assert terminal.finish() == 130
    with Terminal("prune", "--keep", "1", "--store", folder, columns=120) as terminal:
        terminal.wait_for("[y/N] ")
        terminal.type("\x04")
        assert terminal.finish() == 2
    assert len(list_checkpoints(Run(filled, "gpt"))) == 5


@pytest.mark.parametrize(("keep", "code", "left"), [(1, 3, 2), (4, 6, 5)])
def test_a_late_reader_is_spared_and_reported(folder: Path, filled: Store, keep: int, code: int, left: int) -> None:
    # With four kept, only the superseded one would go.
    run = Run(filled, "gpt")
    reader_of = list_checkpoints(run)[2 if keep == 4 else -1]
    with Terminal("prune", "--keep", keep, "gpt", "--store", folder, columns=200) as terminal:
        terminal.wait_for("[y/N] ")
        lease = take_lease(run, reader_of.attempt, "restore on node7", 600)
        terminal.type("y\n")
        assert terminal.finish() == code
        assert f"1 checkpoint spared, held: {reader_of.id}" in terminal.screen
    release_lease(run, lease)
    assert len(list_checkpoints(run)) == left


def test_progress_is_for_people_who_watch(folder: Path, tmp_path: Path) -> None:
    for args in (("verify", "--all"), ("export", "gpt@40", "--to", tmp_path / "x.safetensors")):
        with Terminal(*args, "--store", folder) as terminal:
            assert terminal.finish() == 0
            assert "━" in terminal.screen
    with Terminal("verify", "--all", "--store", folder, "-q") as terminal:
        assert terminal.finish() == 0
        assert "━" not in terminal.screen


def test_a_target_that_does_not_answer_is_named_while_one_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Terminal("ls", "--url", url, columns=120) as terminal:
            terminal.wait_for(f"waiting for {url} ...")
            terminal.interrupt()
            assert terminal.finish() == 130


def test_a_store_that_does_not_answer_is_named_while_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        with Terminal("ls", "--store", "s3://bucket/ckpts", columns=120) as terminal:
            terminal.wait_for("waiting for s3://bucket/ckpts ...")
            terminal.interrupt()
            assert terminal.finish() == 130


def test_no_colour_where_none_is_wanted(folder: Path) -> None:
    with Terminal("ls", "--store", folder) as coloured, Terminal("ls", "--store", folder, "--no-color") as plain:
        assert (coloured.finish(), plain.finish()) == (0, 0)
    assert "\x1b[2m" in coloured.screen
    assert "\x1b[2m\x1b[3" not in plain.screen


def test_a_store_on_s3(s3_store: S3Location, tmp_path: Path) -> None:
    store = open_store(s3_store.url, s3_store.options)
    for step in (1, 2):
        write_checkpoint(store, "gpt", step)
    to = tmp_path / "x.safetensors"
    for args, code in (
        (("ls", "-o", "id"), 0),
        (("verify", "--all"), 0),
        (("export", "gpt@2", "--to", to), 0),
        (("prune", "--keep", "1", "--yes"), 0),
        (("show", "gpt@1"), 4),
    ):
        done = run(*args, "--store", s3_store.url, env=s3_store.environment)
        assert done.code == code, done.stderr
    assert to.exists()
    assert [c.step for c in list_checkpoints(Run(store, "gpt"))] == [2]


class InterruptedSource(StoreSource):
    """Is slow, and gets Ctrl-C when all reads are queued and five have begun."""

    reads = 0

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        open_shard = super().open_shard

        def read(offset: int, buffer: memoryview) -> None:
            InterruptedSource.reads += 1
            if InterruptedSource.reads == 5:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
            with open_shard(checkpoint, shard) as opened:
                opened.read(offset, buffer)

        return RangeReader(read)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("work", ["fetch", "verify"])
def test_ctrl_c_does_not_wait_for_all_that_is_queued(filled: Store, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "READ_BYTES", 1)  # each chunk is fetched alone
    arrays = {f"model/{i}": np.zeros((1 << 20,), dtype=np.uint8) for i in range(100)}
    write_checkpoint(filled, "long", 1, arrays=arrays)
    source, checkpoint = InterruptedSource(filled), latest(Run(filled, "long"))
    content = read_manifest(source, checkpoint).content
    buffers = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    reads = plan_reads(content, whole_entries(content.entries.name))
    InterruptedSource.reads = 0
    begin: dict[str, Callable[[], object]] = {
        "fetch": lambda: fetch(source, checkpoint, reads, buffers, threads=2),
        "verify": lambda: verify(source, checkpoint, threads=2),
    }
    gc.disable()  # an interrupt within a callback of the collector, such as hypothesis's, is dropped
    try:
        with pytest.raises(KeyboardInterrupt):
            begin[work]()
    finally:
        gc.enable()
    assert 5 <= InterruptedSource.reads < 100
