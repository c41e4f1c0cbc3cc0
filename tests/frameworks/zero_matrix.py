"""In each rank: python -m tests.frameworks.zero_matrix FOLDER ROUND DTYPE.

Round 0 trains in every layout, saves it with this project and with DeepSpeed, and keeps its whole state in a file.
Round 1 restores each of these into every layout, compares, and saves what one rank restored as another run, which two
ranks restore in round 2. Prints a line for each comparison: both layouts, how many tensors differed before the restore,
and those that differ after it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.integrations import deepspeed as integration
from tests.frameworks.zero import LAYOUTS, Plain, build, differences, join, train, whole

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FOLDER, ROUND, DTYPE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def save(built: Any, run: str) -> None:
    with ckpt.init(str(FOLDER / "store"), run=run):
        if isinstance(built, Plain):
            ckpt.save(built.module, built.optim, 3)
        else:
            integration.save_async(built, 3).result()


def restore(built: Any, run: str) -> None:
    with ckpt.init(str(FOLDER / "store"), run=run):
        if isinstance(built, Plain):
            restored = ckpt.restore(built.module, built.optim, cast=True)  # buffers of an engine have its type
        else:
            restored = integration.restore(built)
        assert restored is not None


def main() -> None:
    rank = join()
    layouts = [one for one in LAYOUTS if one != "plain" or dist.get_world_size() == 1]
    if ROUND == 0:
        for layout in layouts:
            built = build(layout, DTYPE)
            train(built, range(3))
            found = whole(built)
            if rank == 0:
                torch.save(found, FOLDER / f"{layout}.pt")
            save(built, layout)
            if layout.startswith("zero"):
                built.save_checkpoint(str(FOLDER / "own" / layout), tag="three")
        return
    for path in sorted(FOLDER.glob("*.pt")):
        expected = torch.load(path)
        for target in layouts:
            built = build(target, DTYPE)
            fresh = len(differences(whole(built), expected))
            through = "plain" if target == "fsdp2" else target
            restore(built, path.stem if ROUND == 1 else f"{path.stem}-{through}")
            cast = {name: one.to(TYPES[DTYPE]).float() for name, one in expected.items() if "frozen" in name}
            wanted = expected | (cast if target.startswith("zero") else {})  # DeepSpeed converts them, too
            print("compared", path.stem, target, fresh, *differences(whole(built), wanted) or ["equal"], flush=True)
            if ROUND == 1 and dist.get_world_size() == 1:
                save(built, f"{path.stem}-{target}")


if __name__ == "__main__":
    main()
