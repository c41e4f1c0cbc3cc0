"""Notice of preemption: from every source, and what a schedule makes of it."""

from __future__ import annotations

import os
import random
import signal
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.preemption import (
    DaemonNotice,
    Notice,
    Preemption,
    SaveEstimate,
    Sources,
    estimate_save,
)
from ckpt.saver.launcher import EXIT_BEHIND, EXIT_SAVED
from ckpt.schedule import Limits, Schedule
from ckpt.snapshot import handle
from ckpt.snapshot.handle import LiveHandle, SaveHandle
from ckptapi import bodies
from ckptstore.commits.catalog import latest
from ckptstore.errors import InvalidRequest
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.snapshot.gates import Gate
from tests.ckpt.test_schedule import schedule_of
from tests.ckptapi.scripted import Answer, answer, scripted_daemon
from tests.support.daemons import running_daemon
from tests.support.jobs import Job
from tests.support.waiting import DEADLINE_S, present, wait_until


@contextmanager
def watching(sources: Sources, daemon: DaemonNotice | None = None) -> Iterator[Notice]:
    notice = Notice(sources, lambda: 1000.0, daemon, 0.02)
    try:
        yield notice
    finally:
        notice.close()


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_notice_and_handlers_before_it_are_called(sent: signal.Signals) -> None:
    called: list[int] = []
    with handled(sent, lambda number, frame: called.append(number)):
        with watching(Sources(30.0)) as notice:
            assert notice.deadline is None
            os.kill(os.getpid(), sent)
            wait_until(lambda: notice.deadline is not None)
            assert notice.deadline == 1030.0
            assert notice.source == sent.name
            assert called == [sent]
        os.kill(os.getpid(), sent)
        wait_until(lambda: called == [sent, sent], "the handler before it is back")


def test_the_first_ctrl_c_is_notice_and_the_second_one_interrupts() -> None:
    with (
        handled(signal.SIGINT, signal.default_int_handler),
        watching(Sources(30.0, signals=(signal.SIGINT,))) as notice,
    ):
        signal.raise_signal(signal.SIGINT)
        assert (notice.source, notice.deadline) == ("SIGINT", 1030.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_handler_that_was_installed_later_is_left_alone() -> None:
    with handled(signal.SIGUSR1, signal.SIG_DFL):
        with watching(Sources(30.0)):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_that_calls_ours_also_calls_the_one_before_after_the_end() -> None:
    called: list[str] = []
    with handled(signal.SIGUSR1, lambda number, frame: called.append("first")):
        with watching(Sources(30.0)):
            ours: Any = signal.getsignal(signal.SIGUSR1)

            def last(number: int, frame: FrameType | None) -> None:
                called.append("last")
                ours(number, frame)

            signal.signal(signal.SIGUSR1, last)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: called == ["last", "first"])


def test_a_forked_child_does_not_wait_for_a_lock_of_the_watching_thread() -> None:
    with watching(Sources(30.0)) as notice, notice._stop._cond:  # type: ignore[attr-defined]
        child = threading.Thread(target=notice._restore_handlers, daemon=True)
        child.start()
        child.join(30)
        assert not child.is_alive()


def test_a_file_is_notice(tmp_path: Path) -> None:
    with watching(Sources(30.0, signals=(), file=str(tmp_path / "preempt"))) as notice:
        assert notice.deadline is None
        (tmp_path / "preempt").touch()
        wait_until(lambda: notice.deadline == 1030.0)
        assert "preempt" in notice.source


@pytest.mark.parametrize(
    ("answers", "matches"),
    [
        ([(404, "none"), (404, "none"), (200, '{"action": "terminate"}')], "."),  # AWS
        ([(200, "FALSE"), (500, "TRUE"), (200, "TRUE")], "TRUE"),  # Google
        ([(200, '{"Events": []}'), (200, '{"Events": [{"EventType": "Preempt"}]}')], "Preempt|Terminate"),  # Azure
    ],
)
def test_the_metadata_service_of_a_cloud_is_asked(answers: list[tuple[int, str]], matches: str) -> None:
    with scripted_daemon([Answer(status, body.encode()) for status, body in answers]) as service:
        url, headers = f"{service.url}/preempted", {"Metadata-Flavor": "Google"}
        with watching(Sources(30.0, (), url=url, url_headers=headers, url_matches=matches)) as notice:
            wait_until(lambda: notice.deadline == 1030.0)
    assert [request.headers["metadata-flavor"] for request in service.requests] == ["Google"] * len(answers)


def test_a_service_that_does_not_answer_is_no_notice() -> None:
    with watching(Sources(30.0, (), url="http://127.0.0.1:9/preempted")) as notice:
        assert not notice._announced("http://127.0.0.1:9/preempted")
        assert not notice._announced("http://[nonsense")
        assert notice.deadline is None


class Nonsense(socketserver.BaseRequestHandler):
    """Answers with what is not HTTP."""

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"nonsense\r\n\r\n")


def test_an_answer_that_is_not_http_is_no_notice() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Nonsense) as server, watching(Sources(30.0, ())) as notice:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert not notice._announced(f"http://127.0.0.1:{server.server_address[1]}/preempted")
        thread.join()


Fits = Callable[[float, float], SaveEstimate]


def watched(fits: Fits | None = None, expedite: Callable[[], object] = bool, **sources: Any) -> tuple[Schedule, Notice]:
    """A schedule that gets notice at second 1000."""
    preemption = Preemption(fits or (lambda seconds, _: SaveEstimate("save", seconds, 1.0)), expedite, lambda: 1000.0)
    preemption.watch(Sources(30.0, (), **sources))
    return schedule_of(lambda: None, Limits(3600.0, None), 1.0, preemption=preemption), preemption.notice


def test_a_function_is_asked_by_due() -> None:
    left: list[float | None] = [None, None, 12.0]
    schedule, notice = watched(ask=lambda: left.pop(0))
    assert [schedule.due(step) for step in range(3)] == [False, False, True]
    assert notice.deadline == 1012.0


def test_a_function_is_asked_on_a_rank_with_notice_too() -> None:
    """It may be a barrier of all ranks, and this rank alone got the signal."""
    asked: list[bool] = []
    schedule, notice = watched(ask=lambda: asked.append(True))
    notice._note("a signal", 20.0)
    assert ([schedule.due(step) for step in range(2)], asked) == ([True, False], [True, True])
    assert notice.deadline == 1020.0


@pytest.mark.parametrize(("choice", "code"), [("save", EXIT_SAVED), ("finish", EXIT_BEHIND)])
def test_a_schedule_ends_the_loop_and_saves_only_if_there_is_time(choice: Any, code: int) -> None:
    expedited: list[bool] = []
    asked: list[float] = []

    def fits(seconds: float, begins_in_s: float) -> SaveEstimate:
        asked.append(seconds)
        return SaveEstimate(choice, seconds, 9.0)

    schedule, notice = watched(fits, lambda: expedited.append(True))
    assert not schedule.due(1)
    assert (schedule.stop, schedule.noticed, schedule.exit_code) == (False, False, None)
    notice._note("a test", 20.0)
    assert schedule.noticed
    assert schedule.due(2) is (choice == "save")
    assert (schedule.stop, schedule.exit_code, asked) == (True, code, [20.0])
    assert expedited == [True] * (choice == "save")
    assert [schedule.due(step) for step in range(3, 6)] == [False] * 3, "a loop that goes on saves as before"


def save(**timings: float) -> SaveHandle:
    found = LiveHandle(1, 1000, 0.0)
    found.measure(**timings)
    return found


def test_the_estimate_follows_from_the_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(handle, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert estimate_save(0.0, None, []) == SaveEstimate("save", 0.0, None), "nothing is known: try"
    raw = save(blocked_s=1.0, held_s=0.5, encode_s=1.0, upload_s=4.0, commit_s=0.5, stored_bytes=1000)
    assert estimate_save(8.75, raw, []) == SaveEstimate("save", 8.75, 7.0)
    assert not estimate_save(8.7, raw, []), "a quarter is kept for what else takes time"
    half, waiting = save(encode_s=4.0, upload_s=2.0, stored_bytes=500), LiveHandle(2, 1000, 0.0)
    assert estimate_save(9.0, half, []).estimate_s == pytest.approx(2 * 2.0 + 4.0 * 0.25 * 2)
    waiting.mark_staged()
    now[0] = 102.0
    waiting.uploaded(600)
    assert estimate_save(9.0, raw, [waiting]).estimate_s == pytest.approx(7.0 + 3.0), "some of it is in buffers"
    now[0] = 103.5
    waiting.uploaded(600)
    assert estimate_save(9.0, raw, [waiting]).estimate_s == pytest.approx(7.0 + 0.4 * 5.0)
    assert estimate_save(9.0, None, [waiting]).estimate_s is None, "the progress of a first save is no measure"


def test_the_estimate_counts_what_a_save_under_way_does_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 8 MiB takes seconds on a slow store, and is reported when it is written."""
    now = [100.0]
    monkeypatch.setattr(handle, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    measured = save(encode_s=1.0, upload_s=4.0, commit_s=0.5, stored_bytes=1000)
    small, now[0] = LiveHandle(2, 1000, 0.0), 200.0
    assert estimate_save(99.0, measured, [small]).estimate_s == 10.5, "it is still copied"
    small.mark_staged()
    now[0] = 202.0
    assert estimate_save(99.0, measured, [small]).estimate_s == 10.5 - 2.0
    assert estimate_save(99.0, measured, [small], begins_in_s=1.0).estimate_s == 10.5 - 2.0 - 1.0
    assert estimate_save(99.0, measured, [small], begins_in_s=60.0).estimate_s == 5.5
    large = LiveHandle(3, 10 * CHUNK_BYTES, 0.0)
    large.uploaded(5 * CHUNK_BYTES)
    both, now[0] = [large, small], 300.0
    assert estimate_save(99.0, measured, both[:1]).estimate_s == 5.5 + 4 * 0.5, "a chunk at most: the store may be away"
    assert estimate_save(99.0, measured, both).estimate_s == 5.5 + 4 * 0.5, "the other one is dropped"
    assert estimate_save(99.0, measured, both, begins_in_s=3.0).estimate_s == 5.5 + 4 * 0.5 + 5.0 - 3.0, (
        "it has begun by then"
    )


def test_steps_that_take_longer_than_expected_do_not_make_the_save_late() -> None:
    measured = save(encode_s=1.0, upload_s=4.0, stored_bytes=1000)
    assert estimate_save(6.25, measured, [])
    assert not estimate_save(6.5, measured, [], begins_in_s=2.0), "the last steps need a quarter more as well"
    assert estimate_save(6.75, measured, [], begins_in_s=2.0)


def test_steps_until_the_end_of_the_loop_count_for_saves_under_way() -> None:
    asked: list[tuple[float, float]] = []

    def fits(seconds: float, begins_in_s: float) -> SaveEstimate:
        asked.append((seconds, begins_in_s))
        return SaveEstimate("save", seconds, 9.0)

    schedule, notice = watched(fits)
    notice._note("a test", 20.0)
    schedule._step, schedule._costs = 1, SimpleNamespace(step_s=0.5)  # type: ignore[assignment]
    schedule._stop(5, 1, 1020.0)
    assert asked == [(18.0, 2.0)]
    notice.close()


@pytest.mark.parametrize("grace_s", [0.0, -1.0, float("nan")])
def test_wrong_arguments(grace_s: float) -> None:
    with pytest.raises(InvalidRequest):
        Sources(grace_s)
    with pytest.raises(InvalidRequest, match="pattern"):
        Sources(1.0, url_matches="(")


def test_signals_need_the_main_thread() -> None:
    raised: list[BaseException] = []

    def make() -> None:
        try:
            Notice(Sources(1.0))
        except InvalidRequest as error:
            raised.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_preempted_checkpointer_saves_all_state_uncompressed_and_drops_what_is_queued(tmp_path: Path) -> None:
    model = nn.ParameterDict({"w": torch.randn(1 << 20)})
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer(str(tmp_path), run="r", compress="max", cpu_budget=0.05) as checkpointer:
        checkpointer.on_preemption(grace_s=60.0, signals=(signal.SIGUSR1,))
        schedule = checkpointer.every(seconds=3600.0)
        assert not schedule.due(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert schedule.due(2)
        handle = checkpointer.save_async(model, optim, 2)
        assert schedule.stop
        found = handle.result(60)
    assert found.stored_bytes >= found.raw_bytes
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_last_save_waits_for_a_slot_whatever_on_busy_is(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(4, 4)
    with Checkpointer(str(tmp_path), run="r", writer="thread", slots=1, on_busy="skip") as checkpointer:
        checkpointer.on_preemption(grace_s=60.0, signals=(), ask=lambda: 60.0)
        schedule = checkpointer.every(seconds=3600.0)
        gate.close()
        first = checkpointer.save_async(model, None, 1)
        wait_until(lambda: gate.waiting == 1)
        assert schedule.due(2)
        opening = threading.Timer(0.2, gate.open)
        opening.start()
        last = checkpointer.save_async(model, None, 2)
        assert (first.result(30).step, last.result(30).step, schedule.exit_code) == (1, 2, EXIT_SAVED)
        opening.join()


def test_signals_are_handled_until_the_last_save_is_durable(tmp_path: Path, gate: Gate) -> None:
    """Otherwise a second one, such as SIGTERM after SIGUSR1, kills the trainer, and its exit code is lost."""
    model = nn.Linear(4, 4)
    handlers: list[object] = []

    def open_gate() -> None:
        handlers.append(signal.getsignal(signal.SIGUSR1))
        gate.open()

    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.on_preemption(grace_s=60.0, signals=(signal.SIGUSR1,))
        gate.close()
        checkpointer.save_async(model, None, 1)
        wait_until(lambda: gate.waiting == 1)
        opening = threading.Timer(0.5, open_gate)
        opening.start()
    opening.join()
    assert callable(handlers[0])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_notice_of_the_daemon_is_found_behind_many_events(tmp_path: Path) -> None:
    with running_daemon(str(tmp_path)) as daemon, daemon.client() as client:
        for _ in range(101):
            client.preempt("gpt", 1.0)
        notice = DaemonNotice(daemon.url, None, "gpt")
        client.preempt("gpt", 60.0)
        assert present(notice()) > 30.0


def test_an_answer_that_makes_no_sense_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    details: list[dict[str, Any]] = [{}, {"grace_s": 60.0}]
    kind = bodies.EventKind.PREEMPTED
    events = [bodies.EventBody(id=n, at=1000.0, kind=kind, detail=detail) for n, detail in enumerate(details)]
    pages = [bodies.EventsBody(items=[event], last_id=event.id) for event in events]
    with (
        scripted_daemon([answer(page) for page in pages]) as service,
        watching(Sources(30.0, ()), DaemonNotice(service.url, None, "gpt", lambda: 1000.0)) as notice,
    ):
        wait_until(lambda: notice.deadline == 1060.0)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["cannot look for notice"]


@pytest.mark.parametrize(("rank", "group"), [("0", "all"), ("3", "solo")])
def test_the_daemon_gives_notice_once(rank: str, group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    model = nn.Linear(4, 4)
    with running_daemon(str(tmp_path)) as daemon, daemon.client() as client:
        options: dict[str, Any] = {"daemon": daemon.url, "writer": "thread", "group": group}
        with Checkpointer(str(tmp_path), run="gpt", **options) as checkpointer:
            checkpointer.on_preemption(grace_s=9.0, signals=())
            schedule = checkpointer.every(seconds=3600.0)
            assert not schedule.due(1)
            client.preempt("other", 60.0)
            event = client.preempt("gpt", 60.0, "the node is drained")
            assert event.detail["reason"] == "the node is drained"
            wait_until(lambda: schedule.noticed)
            assert abs(present(checkpointer._preemption.notice.deadline) - (event.at + 60.0)) < 30.0
            assert schedule.due(2)
            checkpointer.save(model, None, 2)
        late = DaemonNotice(daemon.url, None, "gpt")
        assert late() is None
    assert late() is None, "a daemon that does not answer"


ROOT = Path(__file__).parents[2]
MOMENTS = int(os.environ.get("CKPTD_PREEMPTIONS", "2"))
RANKS, STEPS = 3, 1_000_000
RATES = (1e6, 2e6, 4e6, 1e9)


def job_of(store: Path, grace_s: float, rate: float, pace_s: float = 0.0, steps: int = STEPS) -> Job:
    slow = {
        "PYTHONPATH": f"{ROOT / 'tests/support/slow_disk'}:{os.environ.get('PYTHONPATH', '')}",
        "CKPTD_TEST_DISK_BYTES_PER_S": str(rate),
        "CKPTD_TEST_DISK_LOCK": f"{store}-disk",
        "PACE_S": str(pace_s),
    }
    return Job("tests.ckpt.preempted", [str(store), str(steps), str(grace_s)], RANKS, slow)


def losses(lines: list[list[str]]) -> dict[int, str]:
    return {int(words[2]): words[3] for words in lines if words[:2] == ["step", "0"]}


def live(store: Path, seed: int, curve: dict[int, str]) -> int:
    """One life: from the newest checkpoint to SIGTERM at a random moment. Returns its last durable step, up to which it
    extends `curve`."""
    chance = random.Random(seed)
    rate, grace_s = RATES[seed % len(RATES)], chance.choice([4.0, 6.0, 10.0, 20.0])
    commits = store / "r" / "commits"
    before = len(list(commits.glob("*")))
    with job_of(store, grace_s, rate, pace_s=0.05) as job:
        lines, following = job.until(max(curve, default=0) + 2, RANKS), job.lines()
        while (
            seed % 5 and len(list(commits.glob("*"))) <= before
        ):  # otherwise the first save may be under way, or ahead
            lines.append(next(following))
        end = time.monotonic() + chance.uniform(0.0, 3.0)
        while time.monotonic() < end:
            lines.append(next(following))
        job.ranks[chance.randrange(RANKS)].send_signal(signal.SIGTERM)
        lines += following
        codes, errors = {rank.wait(DEADLINE_S) for rank in job.ranks}, job.errors()
    assert codes in ({EXIT_SAVED}, {EXIT_BEHIND}), (codes, errors)
    last, *others = {int(words[2]) for words in lines if words[0] == "end"}
    durable = latest(Run(open_store(str(store)), "r")).step
    assert (durable == last) if codes == {EXIT_SAVED} else (durable < last), (codes, durable, last)
    assert (others, min(losses(lines))) == ([], max(curve, default=0) + 1), "it goes on from the newest checkpoint"
    curve.update({step: loss for step, loss in losses(lines).items() if step <= durable})
    return durable


@pytest.mark.timeout(600 + 60 * MOMENTS)
def test_a_preempted_job_ends_at_one_step_and_goes_on_from_it(tmp_path: Path) -> None:
    """One job, many lives: each goes on from the newest checkpoint, and all losses are those of one life."""
    curve: dict[int, str] = {}
    durable = [live(tmp_path / "store", seed, curve) for seed in range(MOMENTS)]
    found = []
    for name in ("store", "whole"):
        with job_of(tmp_path / name, 60.0, 1e9, steps=durable[-1] + 5) as job:
            found.append(losses(job.finish()))
    assert curve | found[0] == found[1]
