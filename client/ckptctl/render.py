"""Output of commands: results on stdout as table, json, jsonl, yaml or id; notes, questions and progress on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

import msgspec
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from ckptctl.output import ConfirmationMissing, Output
from ckptstore.errors import CkptError, NotWritten

_GAP = 2
_SHORTENED = 12
_UNLIMITED = 10_000
_PATIENCE_S = 2.0


class Row(NamedTuple):
    """One row of a table, in a style."""

    cells: tuple[str, ...]
    style: str = ""


class Table(NamedTuple):
    """Rows under headers; a row without a style may be the tuple of its cells. The last column is truncated first.

    A header that begins with > has its column aligned right. If the terminal is too narrow, columns whose header ends
    in a slash and a number are dropped, the highest number first. A header that ends in ? is left out if its column is
    empty. A table without rows is not printed.
    """

    headers: Sequence[str]
    rows: Sequence[Row | tuple[str, ...]]


Block = Table | dict[str, str] | str
"""A dict has facts: names and values, one pair per line. A string is a line of text."""


def write_file(path: Path, text: str) -> None:
    """Write a file that appears when it is complete. Raises NotWritten."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise NotWritten(f"{path} was not written: {error.strerror}", "Check folder and free space") from error


class Screen:
    """Output to stdout and stderr. For one thread; `progress` callbacks may be called from any thread."""

    def __init__(self, output: Output, color: bool, quiet: bool) -> None:
        self.output = output
        self._quiet = quiet
        self._out = _console(sys.stdout, color)
        self._err = _console(sys.stderr, color)
        self._patience: Timer | None = None

    @contextmanager
    def patience(self, describe: Callable[[], str]) -> Iterator[None]:
        """Print `describe()` on stderr if there is no output within 2 seconds, on terminals only."""
        if self._quiet or not self._err.is_terminal:
            yield
            return
        self._patience = Timer(_PATIENCE_S, self._explain, [describe])
        self._patience.daemon = True
        self._patience.start()
        try:
            yield
        finally:
            self._patience.cancel()

    def _explain(self, describe: Callable[[], str]) -> None:
        try:
            self._err.print(Text(f"{printable(describe())} ..."), soft_wrap=True)
        except CkptError:
            pass  # the command itself reports that it has no target

    def _begin_output(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def emit(self, body: object, ids: Iterable[str], blocks: Iterable[Block], none: str = "") -> None:
        """Print one result; `blocks` is only consumed for tables. none: a note if the result is an empty list."""
        self._begin_output()
        if body == [] and none:
            self.note(none)
        if self.output is Output.TABLE:
            self.preview(blocks)
        elif self.output is Output.ID:
            self._lines(ids)
        elif self.output is Output.JSONL:
            items = body if isinstance(body, list) else [body]
            self._lines(msgspec.json.encode(item).decode() for item in items)
        elif self.output is Output.YAML:
            import yaml

            plain = msgspec.to_builtins(body, str_keys=True)
            self._lines([yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip()])
        else:
            self._lines([msgspec.json.format(msgspec.json.encode(body), indent=2).decode()])

    def preview(self, blocks: Iterable[Block]) -> None:
        """Print blocks before a question, in table format only."""
        self._begin_output()
        if self.output is Output.TABLE:
            for line in self._texts(blocks):
                self._out.print(line, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note on stderr, unless --quiet is set."""
        self._begin_output()
        if not self._quiet:
            self._err.print(Text(printable(text)), soft_wrap=True)

    def confirm(self, question: str, typed: str = "") -> None:
        """Ask for confirmation at the terminal. Raises ConfirmationMissing unless the answer is yes, or `typed`."""
        self._begin_output()
        if self.output is not Output.TABLE or not sys.stdin.isatty():
            raise ConfirmationMissing(
                "nothing was deleted: there is no terminal to confirm at",
                "Add --yes to delete",
            )
        asked = f"Type {typed} to confirm: " if typed else "[y/N] "
        self._err.print(Text(f"{printable(question)} {printable(asked)}"), end="", soft_wrap=True)
        answer = sys.stdin.readline().strip()
        if answer != typed if typed else answer.lower() not in ("y", "yes"):
            raise ConfirmationMissing("nothing was deleted: not confirmed")

    @contextmanager
    def redrawing(self) -> Iterator[Callable[[Iterable[Block]], None] | None]:
        """A function that replaces the blocks on the terminal; None if stdout is not a terminal."""
        self._begin_output()
        if self.output is not Output.TABLE or not self._out.is_terminal:
            yield None
            return
        from rich.live import Live

        with Live(console=self._out, auto_refresh=False) as live:
            yield lambda blocks: live.update(Group(*self._texts(blocks)), refresh=True)

    @contextmanager
    def progress(self, label: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """A progress bar, on terminals only."""
        self._begin_output()
        if self._quiet or not self._err.is_terminal:
            yield lambda _: None
            return
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(printable(label), total=total_bytes)
            yield lambda count: bar.advance(task, count)

    def _texts(self, blocks: Iterable[Block]) -> Iterator[Text]:
        for block in blocks:
            if isinstance(block, Table):
                yield from table_lines(block, self._out.width) if block.rows else ()
            elif isinstance(block, dict):
                yield from facts_lines(block)
            else:
                yield Text(printable(block))

    def _lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._out.file.write(line + "\n")
        self._out.file.flush()


def report_error(error: CkptError, output: Output, color: bool) -> None:
    """Print an error on stderr: as text, or for programs as a JSON object with its code."""
    if output in (Output.JSON, Output.JSONL, Output.YAML):
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        sys.stderr.write(msgspec.json.encode(body).decode() + "\n")  # which is YAML as well
        return
    line = Text.assemble(("error:", "bold red"), " ", printable(" ".join(str(error).split())))
    _console(sys.stderr, color).print(line, soft_wrap=True)


def printable(text: str) -> str:
    """Escape control characters: names come from the store and could contain terminal sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fitting(headers: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> list[tuple[int, int]]:
    """(index, width) of the columns that fit into `width` characters. columns: each title and its cells. Pure."""
    natural = [max(map(cell_len, texts)) for texts in columns]
    shown = [i for i, header in enumerate(headers) if header[-1] != "?" or any(columns[i][1:])]
    last = shown[-1]
    least = natural.copy()
    least[last] = min(natural[last], max(len(columns[last][0]), _SHORTENED))
    dropped = {i: header.removesuffix("?").partition("/")[2] for i, header in enumerate(headers)}
    for i in sorted((i for i in shown if dropped[i]), key=lambda i: dropped[i], reverse=True):
        if sum(least[k] + _GAP for k in shown) - _GAP > width:
            shown.remove(i)
    spare = width - sum(least[i] + _GAP for i in shown) + _GAP
    return [(i, least[i] + max(0, min(spare, natural[i] - least[i]))) for i in shown]


def table_lines(table: Table, width: int) -> Iterator[Text]:
    """The header and the rows of a table. Pure."""
    headers = table.headers
    titles = tuple(header.removeprefix(">").removesuffix("?").partition("/")[0] for header in headers)
    rows = [Row(titles, "bold"), *(row if isinstance(row, Row) else Row(row) for row in table.rows)]
    columns = [[*map(printable, texts)] for texts in zip(*(row.cells for row in rows), strict=True)]
    shown = fitting(headers, columns, width)
    for number, row in enumerate(rows):
        parts = []
        for i, size in shown:
            cell = Text(columns[i][number])
            cell.truncate(size, overflow="ellipsis")
            cell.align("right" if headers[i].startswith(">") else "left", size)
            parts.append(cell)
        line = Text(" " * _GAP).join(parts)
        line.rstrip()
        line.style = row.style
        yield line


def facts_lines(facts: Mapping[str, str]) -> Iterator[Text]:
    """The names and values of facts, with aligned values. Pure."""
    indent = max(map(len, facts)) + _GAP
    for name, value in facts.items():
        yield Text.assemble((name.ljust(indent), "bold"), printable(value))


def _console(file: Any, color: bool) -> Console:
    # A pipe has no width: nothing is truncated unless COLUMNS is set.
    width = None if file.isatty() or "COLUMNS" in os.environ else _UNLIMITED
    return Console(file=file, width=width, no_color=True if not color else None, highlight=False, markup=False)
