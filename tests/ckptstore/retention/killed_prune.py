"""A process that is killed before or after one call of the store.

`python -m tests.ckptstore.retention.killed_prune STORE CALL MODE ATTEMPT`.
"""

from __future__ import annotations

import sys

from ckptstore.names import Attempt
from ckptstore.stores import open_store
from tests.support.checkpoints import prune_undelete_and_collect
from tests.support.stores import Faults, FaultyStore

if __name__ == "__main__":
    url, call, mode, attempt = sys.argv[1:]
    faults = Faults(int(call), mode, killed=True)  # type: ignore[arg-type]
    prune_undelete_and_collect(FaultyStore(open_store(url), faults), Attempt.parse(attempt))
