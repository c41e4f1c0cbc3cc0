"""The program `ckptd`, or `python -m ckptd`. Whoever installed the library alone has it too, and is told so."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point."""
    try:
        from ckptd.commands import cli
    except ModuleNotFoundError as error:
        sys.exit(f"ckptd: there is no {error.name} here, which the daemon needs. pip install 'ckptd[server]'")
    cli()


if __name__ == "__main__":
    main()
