"""A daemon that is killed and started again under load: training does not notice, and restores through it go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from torch import nn

from ckpt import Checkpointer, SaveHandle
from ckptapi.client import DaemonClient
from tests.support.daemons import Daemon, running_daemon
from tests.support.ports import free_port
from tests.support.waiting import present, wait_until

RUN = "busy"
SAVES = 24
KILLS = 2
READERS = 3
ROWS = 1500


def model_of(step: int) -> nn.Linear:
    """A model whose weights encode the step; about 9 MB."""
    model = nn.Linear(ROWS, ROWS, bias=False)
    nn.init.constant_(model.weight, float(step))
    return model


@contextmanager
def restarting(store: Path, folder: Path, port: int) -> Iterator[Daemon]:
    with running_daemon(f"file://{store}", f"sqlite:///{folder}/index.db", options=("--port", str(port))) as daemon:
        yield daemon


def train(store: Path, url: str, stop: threading.Event) -> list[SaveHandle]:
    """Save step after step until asked to stop, and not before there are enough; fewer from then on.

    A daemon that starts slowly would otherwise have the more to index.
    """
    handles: list[SaveHandle] = []
    with Checkpointer(str(store), run=RUN, daemon=url) as checkpointer:
        while len(handles) < SAVES or not stop.is_set():
            handles.append(checkpointer.save_async(model_of(len(handles)), None, len(handles)))
            time.sleep(0.05 if len(handles) < SAVES else 0.5)
    return handles


def restore_often(url: str, stop: threading.Event, steps: list[int]) -> None:
    """Restore the newest through the daemon again and again; steps: filled with those that came back, each whole."""
    with Checkpointer(run=RUN, daemon=url) as checkpointer:
        while not stop.is_set():
            model = model_of(-1)
            restored = present(checkpointer.restore(model))
            assert bool((model.weight == float(restored.step)).all()), "weights of another step, or a mixture"
            assert restored.skipped == []
            steps.append(restored.step)


def check_saves(handles: list[SaveHandle], url: str) -> None:
    """Every save is committed, and the daemon lists it."""
    steps = list(range(len(handles)))
    assert [handle.result().step for handle in handles] == steps
    with closing(DaemonClient(url)) as client:
        wait_until(lambda: {found.step for found in client.checkpoints(RUN)} == set(steps), "the daemon's index")


def wait_for_restores(readers: list[Future[None]], restored: list[list[int]]) -> None:
    """Return when each reader has ended one more restore, or one has failed."""
    before = [len(steps) for steps in restored]
    wait_until(
        lambda: (
            all(len(steps) > count for steps, count in zip(restored, before, strict=True))
            or any(reader.done() for reader in readers)
        ),
        "a restore by each reader in this life of the daemon",
    )


def test_training_is_unaffected_and_restores_go_on(tmp_path: Path) -> None:
    store, port, stop = tmp_path / "store", free_port(), threading.Event()
    url = f"http://127.0.0.1:{port}"
    restored: list[list[int]] = [[] for _ in range(READERS)]
    with Checkpointer(str(store), run=RUN) as checkpointer:
        checkpointer.save(model_of(0), None, 0)
    with ThreadPoolExecutor(READERS + 1) as pool:
        try:
            for life in range(KILLS + 1):
                with restarting(store, tmp_path, port) as daemon:
                    if life == 0:
                        training = pool.submit(train, store, url, stop)
                        readers = [pool.submit(restore_often, url, stop, steps) for steps in restored]
                    wait_for_restores(readers, restored)
                    if life < KILLS:
                        daemon.kill()
                        time.sleep(0.3)
                        continue
                    stop.set()
                    handles = training.result(60)
                    for reader in readers:
                        reader.result(60)
                    check_saves(handles, url)
        finally:
            stop.set()
    for steps in restored:
        assert steps == sorted(steps), "latest never goes back"
