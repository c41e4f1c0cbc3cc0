from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.errors import StoreUnavailable
from tests.conftest import S3Location
from tests.support.daemons import running_daemon
from tests.support.forking import TRAINER, run
from tests.support.training import Loop, same_state
from tests.support.waiting import present, wait_until


def make() -> Loop:
    return Loop(
        lambda p: torch.optim.AdamW(p, lr=0.01), lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50)
    )


def test_training_on_s3_resumes_exactly(s3_store: S3Location) -> None:
    reference = make()
    losses, first = [reference.step() for _ in range(8)], make()
    with Checkpointer(s3_store.url, run="s3", options=s3_store.options) as checkpointer:
        assert checkpointer.restore(first.model, first.optim, scheduler=first.sched) is None
        for step in range(5):
            first.step()
            checkpointer.save_async(first.model, first.optim, step, scheduler=first.sched)
    resumed = make()
    with Checkpointer(s3_store.url, run="s3", options=s3_store.options) as checkpointer:
        restored = present(checkpointer.restore(resumed.model, resumed.optim, scheduler=resumed.sched))
        assert (restored.step, [resumed.step() for _ in range(5, 8)]) == (4, losses[5:])
    assert same_state(resumed.optim.state_dict(), reference.optim.state_dict())


def test_s3_from_the_environment_alone(s3_store: S3Location, tmp_path: Path) -> None:
    program = (
        "import torch, ckpt\n"
        "model = torch.nn.Linear(4, 4)\n"
        "assert ckpt.restore(model) is None\n"
        "print(ckpt.save(model, None, 7).id)\n"
    )
    environment = {**s3_store.environment, "CKPT_STORE": s3_store.url, "CKPT_RUN": "env"}
    (tmp_path / "program.py").write_text(program)
    _, printed, errors = run(TRAINER, "tests.docs.program", [str(tmp_path), "program.py"], environment=environment)
    assert printed.startswith("env@7."), errors


def test_unreachable_s3_is_an_error_not_an_empty_run() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "x", "secret": "y"}
    options["config_kwargs"] = {"retries": {"max_attempts": 0}, "connect_timeout": 2}  # type: ignore[assignment]
    checkpointer = Checkpointer("s3://nowhere/x", run="r", options=options, retry_s=1)
    with pytest.raises(StoreUnavailable, match="s3://nowhere/x"):
        checkpointer.restore(nn.Linear(2, 2))


def test_restore_through_the_daemon_needs_no_store(tmp_path: Path) -> None:
    folder, loop = tmp_path / "store", make()
    with running_daemon(str(folder)) as daemon:
        with Checkpointer(str(folder), run="gpt", daemon=daemon.url) as checkpointer:
            for step in range(3):
                loop.step()
                checkpointer.save_async(loop.model, loop.optim, step, scheduler=loop.sched)
            checkpointer.wait()
            following = [loop.step() for _ in range(3)]
        wait_until(lambda: daemon.latest_step() == 2, "the daemon's knowledge of the commit")
        again = make()
        with Checkpointer(run="gpt", daemon=daemon.url) as reader:
            restored = present(reader.restore(again.model, again.optim, scheduler=again.sched))
            assert restored.step == 2
            assert restored.lease is not None
            assert [again.step() for _ in range(3)] == following
            assert reader.load("gpt@1", names="model/*").keys() >= {"model/embed.weight"}
    assert same_state(again.model.state_dict(), loop.model.state_dict())
