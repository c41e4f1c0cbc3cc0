"""A trainer and commands on a system that has only what macOS has, too: run as a program, with the folder to use.

Takes away what Python documents as absent on macOS, /proc, /sys and /dev/shm, and then says that this is macOS. What
the libraries decide when they are loaded, they decided before.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx  # noqa: F401
import s3fs  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import typer  # noqa: F401
import yaml  # noqa: F401
from torch import nn

ABSENT: dict[Any, tuple[str, ...]] = {
    os: (
        "O_DIRECT", "O_PATH", "copy_file_range", "eventfd", "fdatasync", "memfd_create", "pidfd_open",
        "posix_fadvise", "posix_fallocate", "pwritev2", "preadv2", "sched_getaffinity", "sched_setaffinity", "setns",
        "splice", "unshare", "getxattr", "setxattr", "pipe2",
    ),
    fcntl: ("F_ADD_SEALS", "F_OFD_SETLK", "F_SETPIPE_SZ"),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGPWR"),
    socket: ("SO_PEERCRED", "AF_NETLINK"),
    time: ("CLOCK_BOOTTIME",),
}  # fmt: skip
HIDDEN = ("/proc", "/sys", "/dev/shm")
FULL_SYNC = 51
synced: list[int] = []


def fcntl_of_macos(fd: int, command: int, argument: int = 0, plain: Callable[..., Any] = fcntl.fcntl) -> Any:
    if command == FULL_SYNC:
        return synced.append(fd)
    return plain(fd, command, argument)


def hide(module: Any, name: str) -> None:
    """A function of paths finds nothing in the hidden folders."""
    plain: Callable[..., Any] = getattr(module, name)

    def hiding(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(HIDDEN):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return plain(path, *args, **kwargs)

    setattr(module, name, hiding)


def become_macos() -> None:
    for module, names in ABSENT.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in ("stat", "lstat", "open", "listdir", "scandir", "readlink", "statvfs"):
        hide(os, name)
    hide(builtins, "open")
    hide(sys.modules["io"], "open")
    vars(fcntl).update(fcntl=fcntl_of_macos, F_FULLFSYNC=FULL_SYNC)
    sys.platform = "darwin"


def train(folder: Path) -> None:
    import ckpt

    def new() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(300, 300)
        return model, torch.optim.AdamW(model.parameters())

    model, optim = new()
    with ckpt.Checkpointer(str(folder / "store"), run="r", writer="thread") as checkpointer:
        for step in (1, 2, 3):
            model(torch.ones(2, 300)).sum().backward()
            optim.step()
            checkpointer.save_async(model, optim, step)
    again, optim_again = new()
    with ckpt.Checkpointer(str(folder / "store"), run="r", writer="thread") as checkpointer:
        restored = checkpointer.restore(again, optim_again)
        assert restored is not None
        assert restored.step == 3
    assert torch.equal(again.weight, model.weight)
    for name, tensor in ckpt.load("r@3", "model/*").items():
        assert torch.equal(tensor, again.state_dict()[name.removeprefix("model/")])


def operate(folder: Path) -> None:
    from tests.support.command_line import invoke

    for words in (
        "ls r", "show r@3", "verify r@3", "diff r@1 r@2", "du", "plan --parameters 1e9", "drain",
        f"export r@3 --to {folder}/model.safetensors", f"export r@3 --to {folder}/model.pt",
        f"cp r@3 --to {folder}/copy", "prune r --keep 1 --yes", "scrub r", "doctor", "probe",
    ):  # fmt: skip
        done = invoke(*words.split(), env={"CKPT_STORE": os.environ["CKPT_STORE"]})
        assert done.code == 0, (words, done)


if __name__ == "__main__":
    become_macos()
    os.environ["CKPT_STORE"] = f"{sys.argv[1]}/store"
    train(Path(sys.argv[1]))
    operate(Path(sys.argv[1]))
    print(len(synced), "times durable")
