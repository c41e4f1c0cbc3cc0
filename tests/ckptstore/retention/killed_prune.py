"""A process that is killed at one call of the store, over and over.

`python -m tests.ckptstore.retention.killed_prune STORE`.

Each line of standard input is "CALL MODE ATTEMPT"; a fork does the work and is killed there. The answer is a line with
the signal that ended it, or 0 if it came to its end.
"""

from __future__ import annotations

import os
import sys

from ckptstore.names import Attempt
from ckptstore.stores import open_store
from tests.support.checkpoints import prune_undelete_and_collect
from tests.support.stores import Faults, FaultyStore


def main() -> None:
    store = open_store(sys.argv[1])
    for line in sys.stdin:
        call, mode, attempt = line.split()
        faults = Faults(int(call), mode, killed=True)  # type: ignore[arg-type]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                prune_undelete_and_collect(FaultyStore(store, faults), Attempt.parse(attempt))
                status = 0
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else -os.WEXITSTATUS(ended), flush=True)


if __name__ == "__main__":
    main()
