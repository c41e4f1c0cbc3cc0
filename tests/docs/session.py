"""Runs blocks of Python one after the other in one process, as a reader's interpreter does.

python -m tests.docs.session SOCKET       requests: JSON {"code", "where"}; answers: {"printed", "error"}
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Answer until the other side closes, in the folder of the socket."""
    os.chdir(Path(path).parent)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as stream:
            for line in stream:
                request = json.loads(line)
                stream.write(json.dumps(_run(namespace, **request)) + "\n")
                stream.flush()


def _run(namespace: dict[str, Any], code: str, where: str) -> dict[str, str]:
    printed, error = io.StringIO(), ""
    # Data classes and others look for the source of their code.
    linecache.cache[where] = (len(code), None, code.splitlines(keepends=True), where)
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, where, "exec"), namespace)
        except SystemExit:
            pass
        except BaseException:
            error = traceback.format_exc()
    return {"printed": printed.getvalue(), "error": error}


if __name__ == "__main__":
    main(sys.argv[1])
