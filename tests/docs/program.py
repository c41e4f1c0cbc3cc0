"""Runs a file as `python FILE ARGUMENTS` does in a folder: for forks, which run modules.

python -m tests.docs.program FOLDER FILE ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
