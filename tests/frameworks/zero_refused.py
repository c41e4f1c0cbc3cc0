"""Engines that cannot be saved: python -m tests.frameworks.zero_refused FOLDER prints the code and reason of each."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import ckpt
from ckpt.integrations.deepspeed import restore, save_async
from ckptstore.errors import CkptError
from tests.frameworks.zero import engine, join, train


def refused(*calls: Any) -> None:
    for call in calls:
        try:
            call()
        except CkptError as error:
            print("refused", error.code, error.message, flush=True)
        else:
            raise AssertionError("it was not refused")


def main() -> None:
    join()
    ckpt.init(sys.argv[1], run="refused")
    without = engine(0)
    refused(partial(save_async, without, 1), partial(restore, without))
    built = engine(2, gradient_accumulation_steps=3)
    # Most of these cannot be built on a CPU: their settings are.
    zero = built._config.zero_config
    for owner, name, value in (
        (built, "pipeline_parallelism", True),
        (built, "mp_world_size", 2),
        (built, "has_moe_layers", True),
        (zero, "zero_hpz_partition_size", 2),
        (zero, "zero_quantized_weights", True),
        (built.optimizer, "swap_optimizer", True),
    ):
        before = getattr(owner, name, False)
        setattr(owner, name, value)
        refused(partial(save_async, built, 1))
        setattr(owner, name, before)
    train(built, range(2))
    refused(partial(save_async, built, 1))
    train(built, range(2, 3))
    save_async(built, 1).result()
    ckpt.close()


if __name__ == "__main__":
    main()
