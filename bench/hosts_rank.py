"""A rank of bench.hosts: `hosts_rank WHAT TASK`, where TASK is JSON; rank 0 prints a line of JSON with its result.

WHAT: save or pairs (which wait to be killed), restore, dcp-save, dcp-restore or train. All use the same model, sharded
by FSDP2 over all ranks, with AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import Checkpointer

WIDTH = 1024
BYTES_PER_LAYER = 12 * WIDTH * WIDTH
"""Weights and both moments."""
TIER = "file:///mnt/ckpts"
_TIMEOUT_S = 300.0
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NETWORK = Path("/proc/net/dev")
_SETTLES_S = 1.0


class Rank:
    """Model and optimizer of this rank."""

    def __init__(self, layers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step()

    def step(self) -> float:
        """Train on random numbers; the seconds that it took on this rank."""
        began = time.perf_counter()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        return time.perf_counter() - began

    def tensors(self) -> dict[str, Tensor]:
        """The tensors alone, which is what DCP gets."""
        found: dict[str, Tensor] = {}
        for name, weight in self.model.named_parameters():
            found[f"weight/{name}"] = weight.detach()
            found |= {f"{moment}/{name}": self.optim.state[weight][moment] for moment in _MOMENTS}
        return found

    def digest(self) -> str:
        """The digest of the bytes of this rank."""
        digest = xxhash.xxh3_64()
        for tensor in self.tensors().values():
            assert isinstance(tensor, DTensor)
            digest.update(tensor.to_local().contiguous().numpy().data)
        return digest.hexdigest()


def main(what: str, task: Mapping[str, Any]) -> None:
    """One job, on this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    found: dict[str, Any] = _WHAT[what](Rank(task["layers"], seed=task.get("seed", 1)), task)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    if what in ("save", "pairs"):  # an end would copy the newest checkpoints to the object store, which lacks space
        time.sleep(_TIMEOUT_S * 10)
    dist.barrier()
    dist.destroy_process_group()


def save(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """Save in both tiers; its savers keep the snapshot in memory for `retain_s`."""
    checkpointer = _checkpointer(task, task.get("retain_s", 0.0))
    checkpoint = checkpointer.save(rank.model, rank.optim, 1)
    _wait_for_remote(checkpointer)
    return {"digests": _gathered(rank.digest()), "stored_bytes": checkpoint.stored_bytes}


def restore(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds until all ranks have the state, and the bytes that they read, by source."""
    with _checkpointer(task) as checkpointer:
        dist.barrier()
        began = time.perf_counter()
        restored = checkpointer.restore(rank.model, rank.optim)
        dist.barrier()
        seconds = time.perf_counter() - began
        assert restored is not None
    return {"seconds": seconds, "digests": _gathered(rank.digest()), "read": _gathered(dict(restored.read))}


def dcp_save(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """In the form that DCP reads fastest here: a file of each rank."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as dcp

    make = FsspecWriter if "://" in task["path"] else FileSystemWriter
    dcp(rank.tensors(), storage_writer=make(task["path"], single_file_per_rank=True))
    return {"digests": _gathered(rank.digest())}


def dcp_restore(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """As `restore`, in place."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as dcp

    make = FsspecReader if "://" in task["path"] else FileSystemReader
    dist.barrier()
    began = time.perf_counter()
    dcp(rank.tensors(), storage_reader=make(task["path"]))
    dist.barrier()
    return {"seconds": time.perf_counter() - began, "digests": _gathered(rank.digest())}


def pairs(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """Saves without and with replicas in turns: steps beside a save, time until durable, bytes on the wire."""
    found: dict[str, Any] = {f"{name}-{replicas}": [] for name in _COLUMNS for replicas in (0, 1)}
    savers = [_checkpointer({**task, "run": f"pairs-{replicas}", "replicas": replicas}) for replicas in (0, 1)]
    for saver in savers:
        saver.save(rank.model, rank.optim, 1)
        _wait_for_remote(saver)
    for turn in range(task["repetitions"]):
        for replicas in ((0, 1), (1, 0))[turn % 2]:
            one = _pair(rank, savers[replicas], 2 * turn + 2, task["steps"])
            for name, value in zip(_COLUMNS, one, strict=True):
                found[f"{name}-{replicas}"].append(value)
    return found


_COLUMNS = ("durable_s", "lost_s", "step_s", "wire_bytes", "stored_bytes")


def _pair(rank: Rank, saver: Checkpointer, step: int, steps: int) -> tuple[float, ...]:
    """A save without training, then the same number of steps without and with a save beside them."""
    rank.step()  # else the bytes of the save before are referenced
    dist.barrier()
    sent, began = _sent_bytes(), time.perf_counter()
    checkpoint = saver.save(rank.model, rank.optim, step)
    durable_s = time.perf_counter() - began
    wire_bytes = sum(_gathered(_sent_bytes() - sent))
    plain = [rank.step() for _ in range(steps)]
    began = time.perf_counter()
    handle = saver.save_async(rank.model, rank.optim, step + 1)
    for _ in range(steps):
        rank.step()
    beside_s = time.perf_counter() - began
    handle.result(_TIMEOUT_S)
    plain += [rank.step() for _ in range(steps)]
    return durable_s, beside_s - sum(plain) / 2, median(plain), wire_bytes, checkpoint.stored_bytes


def train(rank: Rank, task: Mapping[str, Any]) -> dict[str, Any]:
    """Under torchrun: restore, then train with a save at every fifth step. Each rank notes in a file what it did.

    The clock, CLOCK_MONOTONIC, is the same on all hosts of the bed.
    """
    path = Path(task["log"], f"{os.environ['RANK']}.log")
    with path.open("a", buffering=1) as log, _checkpointer(task, retain_snapshot_s=600.0) as checkpointer:

        def note(**what: Any) -> None:
            log.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

        restored = checkpointer.restore(rank.model, rank.optim)
        at, step = time.monotonic(), restored.step if restored else 0
        checkpointer.prepare(rank.model, rank.optim)
        read = dict(restored.read) if restored else {}
        note(at=at, restored=step, read=read, pid=os.getpid(), saver=checkpointer.saver_pid)
        while True:
            rank.step()
            step += 1
            note(step=step)
            if step % 5 == 0:
                checkpointer.save(rank.model, rank.optim, step)
                note(saved=step)


def _checkpointer(task: Mapping[str, Any], retain_snapshot_s: float = 0.0) -> Checkpointer:
    return Checkpointer(
        task["store"], run=task["run"], local=TIER, replicas=task["replicas"], replicate_every=1_000_000, slots=1,
        compress="off", retain_snapshot_s=retain_snapshot_s,
    )  # fmt: skip


def _wait_for_remote(checkpointer: Checkpointer) -> None:
    """Until the remote store has the first save, so that later ones are alone on the wire."""
    began = time.monotonic()
    while True:
        time.sleep(0.2)
        waited_s = time.monotonic() - began
        state = [(checkpointer.counters.local_only == 0 and waited_s > _SETTLES_S, waited_s > _TIMEOUT_S)]
        dist.broadcast_object_list(state)
        if state[0][0]:
            return
        if state[0][1]:
            raise RuntimeError("the remote store does not have the first save")


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _sent_bytes() -> int:
    """Bytes that this host has sent, with the headers of TCP."""
    (line,) = [line for line in _NETWORK.read_text().splitlines() if line.lstrip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


_WHAT: dict[str, Callable[[Rank, Mapping[str, Any]], dict[str, Any]]] = {
    "save": save, "restore": restore, "dcp-save": dcp_save, "dcp-restore": dcp_restore, "pairs": pairs, "train": train,
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
