"""References of the command lines, the HTTP API and the metrics, as Markdown made from the programs themselves."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from fastapi import FastAPI
from typer.main import get_command

from ckpt.saver import launcher
from ckptctl import cli as ckptctl
from ckptctl import manual
from ckptd import commands as ckptd
from ckptd.app import create_app
from ckptd.settings import Settings
from docsite import openapi
from docsite.reference import table

ALERTS = Path(__file__).parents[1] / "deploy/prometheus/alerts.yml"
_DEFAULT = re.compile(r"\[default: (.*?)\]")


def command_line() -> str:
    """Every command of ckptctl, ckptd and ckpt-run, as its --help shows it."""
    program: Any = get_command(ckptctl.app)
    context = typer.Context(program, info_name="ckptctl")
    parts = ["## ckptctl", *_explained(program, context)]
    for section, names in manual.SECTIONS.items():
        parts.append(f"### {section}")
        for name in names:
            parts += _command(program.get_command(context, name), context, f"ckptctl {name}", "####")
    daemon: Any = get_command(ckptd.cli)
    context = typer.Context(daemon, info_name="ckptd")
    parts += ["## ckptd", *_explained(daemon, context)]
    for name, command in daemon.commands.items():
        parts += _command(command, context, f"ckptd {name}", "###")
    return "\n\n".join([*parts, "## ckpt-run", f"```text\n{launcher.parser().format_help().rstrip()}\n```"]) + "\n"


def _command(command: Any, parent: typer.Context, name: str, level: str) -> Iterator[str]:
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    yield f"{level} {name}"
    yield from _explained(command, context)
    for child in getattr(command, "commands", {}).values():
        yield from _command(child, context, f"{name} {child.name}", f"{level}#")


def _explained(command: Any, context: typer.Context) -> Iterator[str]:
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield (command.help or "").replace("\b\n", "")
    shown = [parameter for parameter in command.params if not parameter.hidden and parameter.help]
    if shown:
        yield table(["argument", "meaning"], ([_name(one), _DEFAULT.sub(r"Default: `\1`.", one.help)] for one in shown))
    if command.epilog:
        title, _, lines = command.epilog.strip("\b\n").partition("\n")
        yield f"{title}\n\n```text\n{re.sub('^  ', '', lines, flags=re.MULTILINE)}\n```"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    spelled = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" `{parameter.metavar or parameter.name.upper()}`"
    return spelled + value + (f" (`{parameter.envvar}`)" if isinstance(parameter.envvar, str) else "")


@functools.cache
def _daemon() -> FastAPI:
    """A daemon that is not started, over an empty store."""
    folder = tempfile.mkdtemp()
    return create_app(Settings(store=f"{folder}/store", db=f"sqlite:///{folder}/index.db", cache_bytes=0, auth="off"))


def endpoints() -> str:
    """Every endpoint, and every body."""
    document = _daemon().openapi()
    parts = ["## Endpoints"]
    for one in openapi.endpoints(document):
        parts += [f"### {one.method} {one.path}", one.summary]
        rows = ([f"`{it.name}`", it.place, it.kind, it.text] for it in one.parameters)
        parts += [table(["parameter", "in", "type", "meaning"], rows)] * bool(one.parameters)
        body = f"Body: {_body(one.body)}. " if one.body else ""
        parts.append(f"{body}Response: {_body(one.answer) if one.answer else 'no body'}.")
    parts.append("## Bodies")
    for name, text, fields in openapi.schemas(document):
        rows = ([f"`{it.name}`", it.kind, it.place, it.text] for it in fields)
        parts += [f"### {name}", text, table(["field", "type", "", "meaning"], rows)]
    return "\n\n".join(parts) + "\n"


def _body(kind: str) -> str:
    names = {name for name, _, _ in openapi.schemas(_daemon().openapi())}
    return re.sub(r"\w+", lambda word: f"[{word[0]}](#{word[0].lower()})" if word[0] in names else word[0], kind)


def metrics() -> str:
    """Every metric of the daemon, with the alerts that use it."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    rows = []
    for name, kind, labels, text in sorted(_families()):
        used = [f"`{alert}`" for alert, text in alerts.items() if re.search(rf"\b{name}(_bucket)?\b", text)]
        rows.append([f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), text, ", ".join(used)])
    return table(["metric", "kind", "labels", "meaning", "alerts"], rows)


def _families() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name, kind, labels and meaning. Only private attributes have the labels of a metric without samples."""
    registry: Any = _daemon().state.context.metrics.registry
    for collector in registry._collector_to_names:
        labels = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, tuple(labels or getattr(family, "_labelnames", ())), family.documentation
