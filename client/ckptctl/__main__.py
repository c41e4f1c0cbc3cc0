"""The program `ckptctl`, or `python -m ckptctl`. An installation without the extra `cli` reports what is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point."""
    try:
        from ckptctl.cli import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"ckptctl: the command line needs {error.name}, which is not installed. pip install 'ckptd[cli]'")
    run()


if __name__ == "__main__":
    main()
