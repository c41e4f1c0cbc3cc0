"""Memory that torch replaces inside a storage while it is copied: the call waits for the copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tests.ckpt.ddp import ROOT
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import held_copies
from tests.ckpt.snapshot.simulated import plugged_in

PATIENCE_S = 30


def test_memory_that_is_replaced_during_the_copy_is_that_of_the_call(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ckpt.snapshot.replaced_memory", str(tmp_path)]
    trainer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    lines = [f"{call} committed [True, True]" for call in ("put", "share", "resize", "free")]
    assert (trainer.returncode, trainer.stdout.splitlines()) == (0, lines), trainer.stderr


@pytest.mark.usefixtures("everywhere")
def test_only_storages_that_are_copied_wait_and_the_methods_of_torch_are_restored(tmp_path: Path) -> None:
    names = ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")
    before = {name: vars(torch.UntypedStorage).get(name) for name in names}
    model = nn.ParameterList(torch.ones(1 << 14) for _ in range(2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        checkpointer.prepare(model, optim)
        optim.step()  # the leaves of a device overlap from now on
        handle = checkpointer.save_async(model, optim, 1)
        torch.ones(5).share_memory_()  # type: ignore[no-untyped-call]
        torch.ones(5).untyped_storage().resize_(100)
        with FakeTensorMode():  # as a compiler traces it
            torch.ones(5).untyped_storage().resize_(100)
        sharing = threading.Thread(target=model[0].data.share_memory_)
        sharing.start()
        sharing.join(0.2)
        assert sharing.is_alive()
        assert not model[0].is_shared()
        brake.released.set()
        sharing.join(PATIENCE_S)
        assert model[0].is_shared()
        handle.result(PATIENCE_S)
        checkpointer.wait()
    assert {name: vars(torch.UntypedStorage).get(name) for name in names} == before


def test_memory_that_a_device_copies_in_order_is_not_replaced_before(tmp_path: Path) -> None:
    """A first save overlaps with nothing, but the device is late."""
    with plugged_in(0) as simulated:
        model = nn.ParameterList(torch.full((1 << 15,), 3.0) for _ in range(2))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with open_run(tmp_path) as checkpointer:
            released = simulated.hang()
            handle = checkpointer.save_async(model, optim, 1)
            resizing = threading.Thread(target=model[0].untyped_storage().resize_, args=(0,))
            resizing.start()
            resizing.join(0.2)
            assert resizing.is_alive()
            released.set()
            resizing.join(PATIENCE_S)
            assert not resizing.is_alive()
            handle.result(PATIENCE_S)
            found = checkpointer.load(1)
        assert {name: sorted(set(tensor.tolist())) for name, tensor in found.items()} == {
            "model/0": [3.0],
            "model/1": [3.0],
        }
        simulated.synchronize()


@pytest.mark.usefixtures("everywhere")
def test_a_forked_child_replaces_its_memory_without_waiting(tmp_path: Path) -> None:
    model = nn.ParameterList(torch.ones(1 << 14) for _ in range(2))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        checkpointer.prepare(model, optim)
        optim.step()  # the leaves of a device overlap from now on
        handle = checkpointer.save_async(model, optim, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks with other threads
            child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            model[0].untyped_storage().resize_(0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        brake.released.set()
        handle.result(PATIENCE_S)
