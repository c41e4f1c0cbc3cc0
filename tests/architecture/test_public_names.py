"""What users may rely on is complete, explained, and mentioned in the README or in docs/python.md."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import ckpt
from ckpt import Checkpointer, default

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md").read_text() + (ROOT / "docs" / "python.md").read_text()
FUNCTIONS = [name for name in ckpt.__all__ if inspect.isfunction(getattr(ckpt, name))]


@pytest.mark.parametrize("name", ckpt.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(ckpt, name))
    assert f"`{name}" in PAGES or f"ckpt.{name}" in PAGES


def test_nothing_else_is_public() -> None:
    assert dir(ckpt) == sorted(ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pickle'"):
        ckpt.pickle  # noqa: B018


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("init", "load")])
def test_module_functions_take_what_the_methods_take(name: str) -> None:
    def leading(function: object) -> list[str]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]

    assert leading(getattr(default, name)) == leading(getattr(Checkpointer, name))
