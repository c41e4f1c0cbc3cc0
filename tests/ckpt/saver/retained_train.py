"""Trainers of test_retained_snapshot: `retained_train train STORE RETAIN_SNAPSHOT_S` saves two steps, says so, and
waits to be killed.

`retained_train restore STORE FOLDER NAME` restores when there is a file `go` in the folder, and prints as JSON what it
read from where, and the digest of the state. The file `NAME` shows that it is ready. `retained_train fail STORE` saves
one step, and ends by an exception.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from torch import nn

from ckpt import Checkpointer

RUN = "retained"


def network(step: int) -> nn.ParameterDict:
    """Six megabytes, of which one sixth is the same at all steps."""
    torch.manual_seed(0)
    same = torch.randn(1 << 18) * 0.02
    torch.manual_seed(step + 1)
    changing = {f"w{i}": nn.Parameter(torch.randn(1 << 18) * 0.02) for i in range(4)}
    return nn.ParameterDict(changing | {"same": nn.Parameter(same), "ids": nn.Parameter(torch.arange(1 << 17), False)})


def state_digest(model: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def train(store: str, retain_snapshot_s: str) -> None:
    checkpointer = Checkpointer(store, run=RUN, compress="fast", retain_snapshot_s=float(retain_snapshot_s))
    for step in (1, 2):
        checkpointer.save(network(step), None, step)
    print(json.dumps({"saver": checkpointer.saver_pid}), flush=True)
    time.sleep(600)


def restore(store: str, folder: str, name: str) -> None:
    model = network(0)
    with Checkpointer(store, run=RUN) as checkpointer:
        (Path(folder) / name).touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.001)
        restored = checkpointer.restore(model)
        assert restored is not None
        print(json.dumps({"read": restored.read, "digest": state_digest(model)}), flush=True)


def fail(store: str) -> None:
    checkpointer = Checkpointer(store, run=RUN, retain_snapshot_s=600)
    checkpointer.save_async(network(1), None, 1)
    checkpointer.wait()
    print(checkpointer.saver_pid, flush=True)
    raise RuntimeError("an error of training")


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"train": train, "restore": restore, "fail": fail}
    programs[sys.argv[1]](*sys.argv[2:])
