"""A trainer with a local tier, to be killed: `tiered_train STORE LOCAL`. Its weights are a function of the step.

It checks what it resumes from, then saves step after step, printing "resumed STEP", "saver PID",
"saved STEP" (when it is committed locally). PACE_S: seconds between saves.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from ckpt import Checkpointer
from tests.support.kill_train import resumed, say, weights


def main() -> None:
    checkpointer = Checkpointer(sys.argv[1], run="kill", local=sys.argv[2], local_keep=1, retry_s=1.0)
    model, step = resumed(checkpointer)
    while True:
        step += 1
        with torch.no_grad():
            model["w"].copy_(weights(step))
        checkpointer.save(model, None, step)
        say("saver", checkpointer.saver_pid)
        say("saved", step)
        time.sleep(float(os.environ["PACE_S"]))


if __name__ == "__main__":
    main()
