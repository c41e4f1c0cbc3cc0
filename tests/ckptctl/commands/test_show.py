from pathlib import Path

import numpy as np

from ckptstore.clock import system_clock
from ckptstore.commits.commit import commit_attempt
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import write_rank
from tests.support.command_line import invoke


def test_who_wrote_how_much_is_seen_against_the_mean(tmp_path: Path) -> None:
    store, attempt = open_store(str(tmp_path)), Attempt(7, new_ulid(system_clock()))
    random = np.random.default_rng(0)
    receipts = [
        write_rank(
            store, "gpt", attempt, {f"model/{rank}": random.integers(0, 255, size, np.uint8)}, rank, world_size=3
        )
        for rank, size in enumerate((100_000, 100_000, 400_000))
    ]
    commit_attempt(Run(store, "gpt"), receipts)
    shares = invoke("show", "gpt@7", "--store", tmp_path, "-o", "json").json["shards"]
    assert [(share["rank"], share["raw_bytes"]) for share in shares] == [(0, 100_000), (1, 100_000), (2, 400_000)]
    assert [round(share["to_mean"], 1) for share in shares] == [0.5, 0.5, 2.0]
    shown = invoke("show", "gpt@7", "--store", tmp_path).stdout.splitlines()[-4:]
    assert "TO MEAN" in shown[0]
    assert [line.split()[1] for line in shown[1:]] == ["0", "1", "2"]
    assert " 2.00 " in shown[3]
    assert invoke("show", "gpt@8", "--store", tmp_path).code == 4
