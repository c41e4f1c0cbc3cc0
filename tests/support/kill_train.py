"""A trainer to be killed: `kill_train STORE [DAEMON]`. Its weights are a function of the step.

It checks what it resumes from, then saves step after step, printing "resumed STEP",
"saver PID", "saved STEP" (right after save_async returned), "died" (the saver's death was reported).
PACE_S: seconds between saves to a local tier, whose folder is in place of DAEMON; "saved STEP" means committed there.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.errors import SaverDied

SIZE = 300_000


def weights(step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step))


def say(*words: object) -> None:
    """One line, in one write."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def resumed(checkpointer: Checkpointer) -> tuple[nn.ParameterDict, int]:
    """The model and the step after the restore. Exits with 9 if the weights are not those of the step."""
    model = nn.ParameterDict({"w": torch.zeros(SIZE)})
    restored = checkpointer.restore(model)
    step = restored.step if restored else 0
    if restored and not torch.equal(model["w"], weights(step)):
        say("WRONG", step)
        sys.exit(9)
    say("resumed", step)
    return model, step


def main() -> None:
    second, pace_s = sys.argv[2] if len(sys.argv) > 2 else None, os.environ.get("PACE_S")
    options: dict[str, Any] = {"local": second, "local_keep": 1, "retry_s": 1.0} if pace_s else {"daemon": second}
    checkpointer = Checkpointer(sys.argv[1], run="kill", **options)
    model, step = resumed(checkpointer)
    while True:
        step += 1
        with torch.no_grad():
            model["w"].copy_(weights(step))
        try:
            (checkpointer.save if pace_s else checkpointer.save_async)(model, None, step)
        except SaverDied:
            say("died", step)
            step -= 1
            continue
        if checkpointer.saver_pid is not None:
            say("saver", checkpointer.saver_pid)
        say("saved", step)
        time.sleep(float(pace_s or 0.02))


if __name__ == "__main__":
    main()
