"""References of Python, settings and errors, as Markdown made from the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import cleandoc

from ckptd.settings import KNOBS
from ckptstore.errors import kinds

GROUPS: dict[str, dict[str, str]] = {
    "Begin and end": {"init": "ckpt.config.Config", "close": "", "Checkpointer": "ckpt.checkpointer.Checkpointer"},
    "Loops": {"steps": "ckpt.loop.steps", "epochs": "ckpt.loop.epochs"},
    "Save": {"save_async": "", "save": "", "prepare": "", "wait": "", "every": "", "fits": "", "on_preemption": ""},
    "Publish": {"publish": "", "follow": "ckpt.default.follow"},
    "Restore": {"restore": "", "restore_in_stages": "", "load": "ckpt.default.load", "latest": ""},
    "Checkpoints": {
        "runs": "ckpt.default.runs",
        "checkpoints": "ckpt.default.checkpoints",
        "delete": "ckpt.default.delete",
        "Checkpoints": "ckpt.default.Checkpoints",
    },
    "Data": {"data": "ckpt.data.loader.resumable"},
    "Plan": {"plan": "ckptplan.plan.plan"},
    "Results": {
        "Checkpoint": "ckptstore.commits.catalog.Checkpoint",
        "SaveHandle": "ckpt.snapshot.handle.SaveHandle",
        "Timings": "ckpt.snapshot.handle.Timings",
        "Restored": "ckpt.restoring.pipeline.Restored",
        "Schedule": "ckpt.schedule.Schedule",
        "SaveEstimate": "ckpt.preemption.SaveEstimate",
        "Counters": "ckpt.snapshot.handle.Counters",
        "CkptError": "ckptstore.errors.CkptError",
    },
}
"""The public names by use, and where each is written; empty: a method of Checkpointer."""
_HEADINGS = {"data": "ckpt.data.resumable"}
_CLASSES = ("Checkpointer",)


def public_names() -> str:
    """Every public name of `ckpt`, for mkdocstrings."""
    return "\n".join(_groups())


def _groups() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield f"\n## {group}\n"
        for name, home in names.items():
            heading = _HEADINGS.get(name, f"ckpt.{name}")
            members = "false" if name in (*_CLASSES, "init") else "true"
            yield f"::: {home or f'ckpt.checkpointer.Checkpointer.{name}'}"
            yield f"    options:\n      heading: {heading}\n      toc_label: {heading}\n      members: {members}\n"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown. Pure."""
    names = list(head)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def settings() -> str:
    """Every setting of the daemon."""
    rows = []
    for knob in KNOBS:
        secret = knob.metadata["secret"]
        flag = "" if secret else f"`--{knob.name.replace('_', '-')}`"
        default = "" if knob.default == "" else f"`{_number(knob.default)}`"
        rows.append([flag, f"`CKPTD_{knob.name.upper()}`", default, knob.metadata["text"]])
    return table(["option", "environment", "default", "meaning"], rows)


def _number(value: object) -> str:
    if isinstance(value, int) and value >= 1 << 30 and value % (1 << 30) == 0:
        return f"{value >> 30} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def errors() -> str:
    """Every code of an error."""
    rows = (
        (
            f'<a id="{code}"></a>`{code}`',
            f"`{kind.__name__}`",
            str(kind.http_status),
            str(kind.exit_code),
            cleandoc(kind.__doc__ or "").replace("\n", " "),
            kind.remedy,
        )
        for code, kind in kinds().items()
        if kind.__module__ == "ckptstore.errors"
    )
    return table(["code", "class", "HTTP", "exit", "meaning", "what to do"], rows)
