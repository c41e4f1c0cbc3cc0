import io
import sys

import pytest

from ckptctl.output import Output
from ckptctl.render import Row, Screen, Table, facts_lines, printable, table_lines

TABLE = Table(
    ("NAME", ">SIZE", "EXTRA/1", "RARE/2", "METRICS"),
    [("gpt@1", "2.7 MiB", "extra", "rare", "loss=0.1 accuracy=0.9 lr=0.001"), Row(("b", "1 B", "", "", ""), "red")],
)


def lines(width: int) -> list[str]:
    return [line.plain for line in table_lines(TABLE, width)]


def test_a_wide_terminal_shows_everything_aligned() -> None:
    assert lines(200) == [
        "NAME      SIZE  EXTRA  RARE  METRICS",
        "gpt@1  2.7 MiB  extra  rare  loss=0.1 accuracy=0.9 lr=0.001",
        "b          1 B",
    ]


def test_the_last_column_is_shortened_first_and_then_columns_go_by_their_rank() -> None:
    assert lines(50)[1] == "gpt@1  2.7 MiB  extra  rare  loss=0.1 accuracy=0.…"
    assert (lines(40)[0], lines(33)[0]) == ("NAME      SIZE  EXTRA  METRICS", "NAME      SIZE  METRICS")
    assert lines(5)[1].startswith("gpt@1  2.7 MiB"), "what must be seen stays however narrow the terminal is"
    for width in range(30, 80):
        assert max(map(len, lines(width))) <= width


def test_facts_stand_under_one_another() -> None:
    facts = {"id": "gpt@1", "longer": "x"}
    assert [line.plain for line in facts_lines(facts)] == ["id      gpt@1", "longer  x"]


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\nb", "\x9b31m", "\u202e"])
def test_names_from_the_store_cannot_steer_the_terminal(hostile: str) -> None:
    table = Table(("NAME",), [(hostile,), Row((hostile,), "red")])
    lines = [*table_lines(table, 80), *facts_lines({"name": hostile})]
    assert [line.style for line in lines] == ["bold", "", "red", ""]
    shown = [printable(hostile), *(line.plain for line in lines)]
    assert all(text.isprintable() for text in shown)
    assert shown[2] == shown[3] == printable(hostile)


def test_jsonl_is_one_object_a_line_and_ids_are_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for output, expected in ((Output.JSONL, '{"a":1}\n{"a":2}\n'), (Output.ID, "x\ny\n")):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        Screen(output, color=True, quiet=False).emit([{"a": 1}, {"a": 2}], ["x", "y"], ["not shown"])
        assert out.getvalue() == expected
