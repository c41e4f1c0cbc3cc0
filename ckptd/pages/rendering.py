"""Renders templates as pages. All values are escaped."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from ckptstore import human
from ckptstore.analysis.charts import compact

_NEVER_KEPT = {"Cache-Control": "no-store"}


def _moment(epoch: float) -> str:
    try:
        return human.moment(epoch)
    except (OverflowError, ValueError, OSError):  # times from a store are arbitrary
        return "unknown time"


_TEMPLATES = Environment(
    loader=PackageLoader("ckptd.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_TEMPLATES.filters |= {
    "age": human.age,
    "compact": compact,
    "count": human.count,
    "duration": human.duration,
    "moment": _moment,
    "size": human.size,
}
_TEMPLATES.globals |= {
    "version": version("ckptd"),
    "mark": Markup((files("ckptd.pages") / "static" / "icon.svg").read_text().strip()),
    "visitor": None,  # of a page outside the frame
    "live_s": 0,
}


def page(template: str, status: int = 200, /, **values: Any) -> HTMLResponse:
    """A page; browsers and proxies do not cache it."""
    return HTMLResponse(_TEMPLATES.get_template(template).render(values), status, _NEVER_KEPT)
