"""A trainer without torch: `fitting_train STORE MEGABYTES SAVES [GRACE]`. It makes so many saves, and waits.

It prints "saver PID", and "accepted STEP" as soon as a save survives its death. With GRACE it makes one save more, the
first, which is durable before it prints "fits CHOICE ESTIMATE": what there is time for.
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
    store, megabytes, saves, *grace_s = sys.argv[1:]
    checkpointer = Checkpointer(store, run="r", compress="off", max_references=0)
    for step in range(1, int(saves) + len(grace_s) + 1):
        weights = np.full(int(megabytes) << 18, step, np.float32)
        handle = checkpointer.save_async(None, None, step, shared={"w": weights})
        if step == 1:
            print("saver", checkpointer.saver_pid, flush=True)
        if step == 1 and grace_s:
            handle.result(120)
            fit = checkpointer.fits(float(grace_s[0]))
            print("fits", fit.choice, fit.estimate_s, flush=True)
        elif handle.wait_staged(120):
            print("accepted", step, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
