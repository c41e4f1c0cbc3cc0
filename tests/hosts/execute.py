"""Run a function or a program on a host: `execute call MODULE:FUNCTION ARGUMENTS`, `execute run PROGRAM ...`."""

from __future__ import annotations

import importlib
import json
import os
import sys

if __name__ == "__main__":
    how, what, *arguments = sys.argv[1:]
    if how == "run":
        os.execvp(what, [what, *arguments])
    module, _, function = what.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), function)(*json.loads(arguments[0]))))
