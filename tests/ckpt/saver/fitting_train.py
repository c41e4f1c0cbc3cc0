"""A trainer without torch that asks what fits: `fitting_train STORE MEGABYTES SAVES GRACE`.

Its first save is durable before it prints "fits CHOICE ESTIMATE" for GRACE; it then makes SAVES more, prints
"accepted STEP" as soon as a save survives its death, and waits.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

without: dict[str, Any] = {"torch": None}  # it takes seconds, and nothing here needs it
sys.modules.update(without)

import numpy as np  # noqa: E402

from ckpt import Checkpointer  # noqa: E402


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    store, megabytes, saves, grace_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    checkpointer = Checkpointer(store, run="r", compress="off", max_references=0)
    for step in range(1, saves + 2):
        weights = np.full(megabytes << 18, step, np.float32)
        handle = checkpointer.save_async(None, None, step, shared={"w": weights})
        if step == 1:
            print("saver", checkpointer.saver_pid, flush=True)
            handle.result(120)
            fit = checkpointer.fits(grace_s)
            print("fits", fit.choice, fit.estimate_s, flush=True)
        elif handle.wait_staged(120):
            print("accepted", step, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
