"""The stores of the tests of the command line, whose exports and imports are tested here."""

from tests.ckptctl.conftest import filled, folder, training

__all__ = ["filled", "folder", "training"]
