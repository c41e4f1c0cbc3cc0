"""The saver's memory: a trainer that restarts on the same host reads no shard, and no wrong byte."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.host.lock import host_folder
from ckpt.host.segment import Segment
from ckpt.saver import retained_snapshot
from ckpt.saver.presence import SaverState, _read, savers
from ckpt.saver.retained_snapshot import Attach, HeldSnapshot, Refused, RetainedSnapshot, SlotContents, ask, socket_path
from ckptstore.format.documents import Shard
from ckptstore.format.shards import ChunkSpan, EncodedChunk, chunk_table
from ckptstore.names import Attempt, new_ulid, shard_name
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.ckpt.saver.attempts import new_attempt, new_job, new_setup
from tests.ckpt.saver.retained_train import RUN, network, state_digest
from tests.support.forking import TRAINER, fork, run
from tests.support.stores import CountingStore
from tests.support.trainers import is_alive
from tests.support.waiting import Lines, open_files, present, wait_until

RETAIN_SNAPSHOT_S = "600"
SIZE = 1 << 16
ROOT = Path(__file__).parents[3]
PROGRAM = "tests.ckpt.saver.retained_train"


@contextmanager
def killed_trainer(
    store: Path, retain_snapshot_s: str = RETAIN_SNAPSHOT_S, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """The process id of the saver of a trainer that has saved two steps and was killed; where the host is the usual one
    and memory is kept, that says so."""
    said, says = os.pipe()
    arguments = ["train", str(store), retain_snapshot_s]
    process = fork(TRAINER, PROGRAM, arguments, stdout=says, stderr=2, environment=environment)
    os.close(says)
    try:
        with open(said) as output:
            saver = int(json.loads(Lines(output).next())["saver"])
    finally:
        process.kill()
        process.wait()
    try:
        if retain_snapshot_s == RETAIN_SNAPSHOT_S and environment is None:
            wait_for_memory(store)
        yield saver
    finally:
        if is_alive(saver):
            os.kill(saver, signal.SIGKILL)
            wait_until(lambda: not is_alive(saver), "the end of the saver")


def wait_for_memory(store: Path) -> None:
    wait_until(lambda: sockets(store), "a saver that keeps memory")
    wait_until(lambda: any(note.idle for note in notes(store)), "a note of it")


def sockets(store: Path) -> list[Path]:
    of_run = socket_path(open_store(str(store)).url, RUN, "*")
    return list(of_run.parent.glob(of_run.name))


def notes(store: Path) -> list[SaverState]:
    found = [state for path in host_folder().glob("*.note") if (state := _read(path)) is not None]
    return [note for note in found if note.store == open_store(str(store)).url]


class SlowStore(CountingStore):
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        time.sleep(len(buffer) / 1e6)
        return super().read_into(key, offset, buffer)


def slowed(checkpointer: Checkpointer) -> SlowStore:
    source = checkpointer._source
    assert isinstance(source, StoreSource)
    source.store = slow = SlowStore(source.store)
    return slow


def test_a_restart_on_the_same_host_reads_no_shard_and_frees_the_memory(tmp_path: Path) -> None:
    store, model = tmp_path / "store", network(0)
    with killed_trainer(store) as saver, Checkpointer(str(store), run=RUN) as checkpointer:
        slow, restored = slowed(checkpointer), present(checkpointer.restore(model))
        assert restored.step == 2
        assert restored.read == {"memory": restored.checkpoint.raw_bytes, "store": 0}
        assert (slow.reads, state_digest(model)) == ([], state_digest(network(2)))
        assert is_alive(saver)
        # The second save had referenced what had not changed. A restart needs neither.
        assert restored.checkpoint.referenced_bytes > 0
        checkpointer.save(model, None, 3)
        wait_until(lambda: not is_alive(saver), "the end of the saver, whose memory is needed for a slot")
    assert sockets(store) == []


def test_a_flipped_bit_in_memory_is_read_from_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, model = tmp_path / "store", network(0)
    with killed_trainer(store) as saver:
        for descriptor, link in open_files(saver).items():
            if "ckpt-arena" in link:
                with descriptor.open("r+b", buffering=0) as file:
                    byte = os.pread(file.fileno(), 1, 3_000_000)
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), 3_000_000)
        with Checkpointer(str(store), run=RUN) as checkpointer:
            slow, restored = slowed(checkpointer), present(checkpointer.restore(model))
    content = read_manifest(StoreSource(open_store(str(store))), restored.checkpoint).content
    sizes = set(content.shards[0].chunks.raw.tolist())
    assert restored.read["store"] in sizes
    assert restored.read["memory"] == restored.checkpoint.raw_bytes - restored.read["store"]
    assert 0 < slow.read_bytes <= max(sizes)
    assert state_digest(model) == state_digest(network(2))
    assert "damaged" in caplog.text
    assert restored.skipped == []


def test_two_trainers_attach_at_once(tmp_path: Path) -> None:
    store, results = tmp_path / "store", []
    with killed_trainer(store):
        pipes, processes = [], []
        for name in ("first", "second"):
            said, says = os.pipe()
            arguments = ["restore", str(store), str(tmp_path), name]
            processes.append(fork(TRAINER, PROGRAM, arguments, stdout=says, stderr=2))
            os.close(says)
            pipes.append(open(said))  # noqa: SIM115 - closed below
        wait_until(lambda: (tmp_path / "first").exists() and (tmp_path / "second").exists(), "both")
        (tmp_path / "go").touch()
        for pipe, process in zip(pipes, processes, strict=True):
            with pipe:
                results.append(json.loads(Lines(pipe).next()))
            assert process.wait(60) == 0
    for result in results:
        assert (result["digest"], result["read"]["store"]) == (state_digest(network(2)), 0)


def test_another_run_store_or_attempt_is_refused_and_an_idle_saver_holds_up_nothing(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with killed_trainer(Path(store)) as saver:
        url = open_store(store).url
        newest, first = StoreSource(open_store(store)).checkpoints(RUN)
        for question, text in (
            (Attach(url, "other", str(newest.attempt)), "has saved run"),
            (Attach("file:///elsewhere", RUN, str(newest.attempt)), "has saved run"),
            (Attach(url, RUN, str(first.attempt)), "is not in memory here"),
            (retained_snapshot.Release(url, RUN, 3), "the memory of rank 0"),
        ):
            [(answer, _)] = ask(url, RUN, question)
            assert isinstance(answer, Refused)
            assert text in answer.reason
        [(answer, _)] = ask(url, RUN, Attach(url, RUN, str(newest.attempt)))
        assert isinstance(answer, HeldSnapshot)
        assert list(ask(url, "other", Attach(url, "other", str(newest.attempt)))) == []
        # Another run of the same store does not find it either.
        with Checkpointer(store, run="other") as checkpointer:
            assert checkpointer.restore(network(0), checkpoint=newest.id) is not None
        assert saver not in [state.pid for state in savers()]
        assert sum("ckpt-arena" in link for link in open_files(saver).values()) == 1
        wait_until(lambda: os.readlink(f"/proc/{saver}/cwd") == "/", "that it leaves the folder of the job")
        os.kill(saver, signal.SIGTERM)
        wait_until(lambda: not is_alive(saver), "the end by a signal")
        # Its socket is removed by the next one that looks.
        assert list(ask(url, RUN, retained_snapshot.Release("", RUN, 0))) == []
        assert sockets(Path(store)) == []


OTHER_USER = """
import contextlib, os, socket, sys
from ckpt.saver.retained_snapshot import Answer, Attach
from ckpt.saver.messages import Channel

folder, name, store, run, attempt = sys.argv[1:]
os.chdir(folder)
os.setgid(65534)
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(name)
except PermissionError:
    print("no way in")
    sys.exit()
channel = Channel(peer, 30.0)
with contextlib.suppress(BrokenPipeError):  # the refusal does not wait for what is asked
    channel.send(Attach(store, run, attempt))
print(channel.receive(Answer))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(tmp_path: Path) -> None:
    """In a folder of its own, whose mode is changed."""
    store, environment = tmp_path / "store", {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with killed_trainer(store, environment=environment):
        folder = tmp_path / f"ckpt-{os.getuid()}"
        wait_until(lambda: list(folder.glob("memory/*[!w]")), "a saver that keeps memory")  # *.new is one that begins
        [path] = folder.glob("memory/*")
        url, newest = open_store(str(store)).url, StoreSource(open_store(str(store))).latest(RUN)

        def ask_as_other() -> str:
            command = [sys.executable, "-c", OTHER_USER, str(path.parent), path.name, url, RUN, str(newest.attempt)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        assert ask_as_other() == "no way in"
        path.chmod(0o666)
        for each in (folder, path.parent):
            each.chmod(0o711)
        assert ask_as_other() == "Refused(reason='the peer belongs to another user')"


def test_an_idle_saver_ends_by_itself(tmp_path: Path) -> None:
    with killed_trainer(tmp_path, "0.5") as saver:
        wait_until(lambda: not is_alive(saver), "the end of retain_snapshot_s")


def test_the_memory_of_a_trainer_that_ends_by_an_exception_is_kept(tmp_path: Path) -> None:
    store, model = str(tmp_path / "store"), network(0)
    _, printed, errors = run(TRAINER, PROGRAM, ["fail", store])
    assert "an error of training" in errors
    saver = int(printed)
    try:
        wait_for_memory(Path(store))
        with Checkpointer(store, run=RUN) as checkpointer:
            assert present(checkpointer.restore(model)).read["store"] == 0
            checkpointer.prepare(model, None)
        wait_until(lambda: not is_alive(saver), "the end of the saver")
    finally:
        if is_alive(saver):
            os.kill(saver, signal.SIGKILL)
    assert state_digest(model) == state_digest(network(1))


def test_nothing_is_retained_after_a_close_or_without_retain_snapshot_s(tmp_path: Path) -> None:
    with suppress(SystemExit), Checkpointer(str(tmp_path / "store"), run=RUN, retain_snapshot_s=600) as checkpointer:
        checkpointer.save(network(1), None, 1)
        saver = present(checkpointer.saver_pid)
        sys.exit()  # no error
    assert not is_alive(saver)
    with killed_trainer(tmp_path / "store2", "0") as saver:
        wait_until(lambda: not is_alive(saver), "the end of the saver")


ONE, TWO, THREE = (Attempt(step, new_ulid(float(step))) for step in (1, 2, 3))


def hold(contents: SlotContents, number: int, slot: int, attempt: Attempt) -> None:
    """A job of one chunk of 64 KiB is uploaded."""
    job = new_job(new_attempt(attempt.step), number=number, slot=slot)
    chunk = EncodedChunk(b"", SIZE, SIZE, "zstd", "01" * 16, "02" * 16)
    span = ChunkSpan(0, SIZE, "uint8")
    contents.submitted(job)
    shard = Shard(name=shard_name(0), rank=0, chunks=chunk_table([chunk]))
    contents.uploaded(job, attempt, [shard], [(span, b"\2" * 16)])


def held(attempt: Attempt) -> HeldSnapshot:
    return HeldSnapshot(str(attempt), {shard_name(0): 0}, SIZE, [0], [SIZE], b"\1" * 16, b"\2" * 16)


def test_what_the_slots_hold_follows_commits_failures_and_reuse() -> None:
    contents = SlotContents()
    hold(contents, 1, 0, ONE)
    hold(contents, 2, 1, TWO)
    assert set(contents.slots()) == {0, 1}  # the second may never be committed
    contents.ended(2, committed=True)
    assert contents.slots() == {1: held(TWO)}
    hold(contents, 3, 0, THREE)
    contents.ended(3, committed=False)
    assert set(contents.slots()) == {1}
    hold(contents, 4, 1, THREE)
    assert contents.slots() == {1: held(THREE)}


SETUP = new_setup("file:///somewhere", run=RUN, retain_snapshot_s=600.0)


def ask_for_one() -> list[retained_snapshot.Answer]:
    return [answer for answer, _ in ask(SETUP.store, RUN, Attach(SETUP.store, RUN, str(ONE)))]


@pytest.mark.parametrize("cause", ["little memory", "an error"])
def test_the_memory_is_freed_when_the_host_needs_it(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    available = [1 << 40]
    monkeypatch.setattr(retained_snapshot, "available_bytes", lambda environ: available[0])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    contents, segments = SlotContents(), {0: Segment(SIZE), 1: Segment(SIZE)}
    hold(contents, 1, 1, ONE)
    kept = RetainedSnapshot(SETUP, contents, segments)
    assert (set(segments), ask_for_one()) == ({1}, [held(ONE)])
    if cause == "an error":
        available.clear()
    else:
        available[0] = SIZE // 8 - 1
    wait_until(lambda: not segments, "the end of the memory")
    kept.wait()
    assert ask_for_one() == []


def test_a_socket_is_found_only_once_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses connections counts as left behind, and is removed."""
    listen, early = socket.socket.listen, list[retained_snapshot.Answer]()

    def ask_and_listen(self: socket.socket) -> None:
        early.extend(ask_for_one())
        listen(self)

    contents, segments = SlotContents(), {1: Segment(SIZE)}
    hold(contents, 1, 1, ONE)
    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "listen", ask_and_listen)
        kept = RetainedSnapshot(SETUP, contents, segments)
    assert (early, ask_for_one()) == ([], [held(ONE)])
    retained_snapshot.release(SETUP.store, RUN, SETUP.rank)
    kept.wait()
