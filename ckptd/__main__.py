"""The program `ckptd`, or `python -m ckptd`. An installation without the extra `server` reports what is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point."""
    try:
        from ckptd.commands import cli
    except ModuleNotFoundError as error:
        sys.exit(f"ckptd: the daemon needs {error.name}, which is not installed. pip install 'ckptd[server]'")
    cli()


if __name__ == "__main__":
    main()
