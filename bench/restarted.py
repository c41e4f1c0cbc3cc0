"""A trainer for bench.restart: imports, builds, restores, makes one step, and says when.

    python -m bench.restarted WAY STORE BLOCKS RETAIN_SNAPSHOT_S [--digest]

WAY: nothing, ckptd, torch.load or dcp. It prints a line of JSON after the first step; with --digest that of the
restored state instead. With RETAIN_SNAPSHOT_S it saves then, and prints another line. It waits to be killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ckpt

RUN = "restart"


def main() -> None:
    """The clock of the benchmark runs since exec: torch is imported here."""
    way, store, blocks, retain_snapshot_s, *flags = sys.argv[1:]
    checkpointer = None
    if way == "ckptd":
        checkpointer = ckpt.init(store, run=RUN, slots=1, compress="off", retain_snapshot_s=float(retain_snapshot_s))
    import torch

    from bench.gpt import GPT, VOCABULARY
    from bench.state import MOMENTS, State, shape

    size = shape()
    model = GPT(size.dim, int(blocks), size.context)
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    if way == "dcp":  # it restores in place
        for weight in model.parameters():
            zeros = {moment: torch.zeros_like(weight) for moment in MOMENTS}
            optim.state[weight] = {"step": torch.tensor(0.0), **zeros}
    state = State("fp32", model, optim)
    said = {"built_at": time.monotonic()} | _restore(way, Path(store), state)
    said["restored_at"] = time.monotonic()
    if flags:
        said["digest"] = state.digest()
    else:
        model.loss(torch.randint(VOCABULARY, (size.batch, size.context + 1))).backward()  # type: ignore[no-untyped-call]
        optim.step()
    print(json.dumps(said | {"stepped_at": time.monotonic()}), flush=True)
    if checkpointer is not None and float(retain_snapshot_s):
        ckpt.save(model, optim, said["step"] + 1)
        print(json.dumps({"saver": checkpointer.saver_pid}), flush=True)
    time.sleep(600)


def _restore(way: str, store: Path, state: Any) -> dict[str, Any]:
    if way == "ckptd":
        restored = ckpt.restore(state.model, state.optim)
        assert restored is not None
        return {"step": restored.step, "read": restored.read}
    if way != "nothing":
        from bench.peers.dcp import Dcp
        from bench.peers.torch_save import TorchSave

        (Dcp() if way == "dcp" else TorchSave()).load(store, state)
    return {}


if __name__ == "__main__":
    main()
