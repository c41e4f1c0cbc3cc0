"""A trainer to be killed while a snapshot passes through its slot: `stream_train STORE`.

It saves step 1, stops its saver and says its process id, then says "streaming" and saves step 2, for ever.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.saver.streaming import LEAST_BYTES


def main() -> None:
    """Train until killed."""
    model = nn.ParameterDict({"w": torch.zeros(LEAST_BYTES // 2)})
    checkpointer = Checkpointer(sys.argv[1], run="r", staging_bytes=LEAST_BYTES)
    checkpointer.save(model, None, 1)
    assert checkpointer.saver_pid is not None
    os.kill(checkpointer.saver_pid, signal.SIGSTOP)
    sys.stdout.write(f"{checkpointer.saver_pid}\nstreaming\n")
    sys.stdout.flush()
    checkpointer.save_async(model, None, 2)


if __name__ == "__main__":
    main()
