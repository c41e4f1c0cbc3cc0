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
    store = open_store(str(tmp_path))
    attempt = Attempt(7, new_ulid(system_clock()))
    random = np.random.default_rng(0)
    receipts = [
        write_rank(
            store, "gpt", attempt, {f"model/{rank}": random.integers(0, 255, size, np.uint8)}, rank, world_size=3
        )
        for rank, size in enumerate((100_000, 100_000, 400_000))
    ]
    commit_attempt(Run(store, "gpt"), receipts)
    shares = invoke("shards", "gpt@7", "--store", tmp_path, "-o", "json").json
    assert [(share["rank"], share["raw_bytes"]) for share in shares] == [(0, 100_000), (1, 100_000), (2, 400_000)]
    assert [round(share["to_mean"], 1) for share in shares] == [0.5, 0.5, 2.0]
    shown = invoke("shards", "gpt@7", "--store", tmp_path).stdout.splitlines()
    assert shown[0].split()[-2:] == ["TO", "MEAN"]
    assert [line.split()[1] for line in shown[1:]] == ["0", "1", "2"]
    assert shown[3].endswith("2.00")
    assert invoke("shards", "gpt@8", "--store", tmp_path).code == 4
