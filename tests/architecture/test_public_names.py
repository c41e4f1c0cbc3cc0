"""What users may rely on is complete, explained, and has a place in the reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal

import pytest

import ckpt
from ckpt import Checkpointer, default
from ckpt.config import Config
from ckptstore.errors import InvalidRequest
from docsite.reference import GROUPS

FUNCTIONS = [name for name in ckpt.__all__ if inspect.isfunction(getattr(ckpt, name))]


@pytest.mark.parametrize("name", ckpt.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(ckpt, name))
    assert [group for group, names in GROUPS.items() if name in names]


def test_nothing_else_is_public() -> None:
    assert dir(ckpt) == sorted(ckpt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pickle'"):
        ckpt.pickle  # noqa: B018


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if hasattr(Checkpointer, name) and name not in ("load", "wait", "close")]
)
def test_module_functions_show_the_signature_and_text_of_the_methods(name: str) -> None:
    function, method = getattr(default, name), getattr(Checkpointer, name)
    its = inspect.signature(method)
    assert inspect.signature(function) == its.replace(parameters=list(its.parameters.values())[1:])
    assert (inspect.getdoc(function) or "").startswith(inspect.getdoc(method) or "-")


@pytest.mark.parametrize("function", [Checkpointer, ckpt.init])
def test_every_setting_is_shown_with_its_type_and_default_and_explained(function: Any) -> None:
    shown = inspect.signature(function).parameters
    knobs = inspect.signature(Config, eval_str=True).parameters
    assert dict(shown) == dict(knobs)
    assert shown["compress"].annotation == Literal["auto", "off", "fast", "max"]
    page = (Path(__file__).parents[2] / "docs/reference/settings.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(knobs)


def test_unknown_knobs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'reference' is not a setting"):
        Checkpointer("memory://", run="r", reference=False)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="'reference' is not a setting"):
        ckpt.init("memory://", run="r", reference=False)  # type: ignore[call-arg]


def test_any_keyword_but_the_reserved_ones_may_name_an_extra() -> None:
    loop: dict[str, Any] = {"self": 1, "method": 2}
    with Checkpointer("memory://names", run="r") as checkpointer:
        checkpointer.save(None, None, 1, **loop)
        restored = checkpointer.restore(self=0, method=0)
    assert restored is not None
    assert restored.values == loop
