"""python -m ckptctl."""

from ckptctl.cli import main

main()
