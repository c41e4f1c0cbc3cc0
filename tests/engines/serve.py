"""A server of vLLM whose processes a test may kill: a line that it gets is a command, which it answers by a line.

python -m tests.engines.serve DESCRIPTOR FOLDER CHECKPOINT
"""

from __future__ import annotations

import json
import socket
import sys

from tests.engines.engine import answers, engine


def main(descriptor: str, folder: str, checkpoint: str) -> None:
    llm = engine(folder, {"checkpoint": checkpoint}, tensor_parallel_size=2, distributed_executor_backend="mp")
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rw") as lines:
        print(json.dumps({"started": checkpoint}), file=lines, flush=True)
        for line in lines:
            try:
                if line.strip():
                    llm.start_weight_update()
                    llm.update_weights({"update_info": {"checkpoint": line.strip()}})
                    llm.finish_weight_update()
                tokens, rows = answers(llm)
                found: dict[str, object] = {"tokens": tokens, "rows": rows.tolist()}
            except Exception as error:  # the engine is dead
                found = {"error": repr(error)}
            print(json.dumps(found), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
