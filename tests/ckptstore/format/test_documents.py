"""docs/explanation/format.md is exact, and what was written in format 1 stays readable for ever."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ckptstore import names
from ckptstore.codecs.chunk_codecs import CODECS
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.commits.catalog import latest
from ckptstore.reading.source import StoreSource, read_manifest, read_receipt
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckptstore.format import frozen, independent_reader
from tests.support.checkpoints import read_all, sample_arrays, write_checkpoint

ROOT = Path(__file__).parents[3]
FORMAT_1 = ROOT / "tests/data/format-1"


@pytest.fixture(params=["format-1", "written now"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "format-1":
        return FORMAT_1
    frozen.write_frozen(open_store(str(tmp_path)))
    return tmp_path


def test_our_reader_reads_it(folder: Path) -> None:
    source = StoreSource(open_store(str(folder)))
    checkpoint = source.latest(frozen.RUN)
    assert (checkpoint.attempt, checkpoint.created_at, checkpoint.metrics) == (
        frozen.ATTEMPT, frozen.MOMENT, frozen.METRICS,
    )  # fmt: skip
    assert verify(source, checkpoint).ok
    manifest = read_manifest(source, checkpoint)
    content = manifest.content
    assert {c for shard in content.shards for c in shard.chunks.codecs} == set(CODECS), "every codec is in it"
    assert (content.trees, content.aliases) == (frozen.TREES, frozen.ALIASES)
    local = [read_receipt(source, checkpoint, manifest, rank).local for rank in range(frozen.WORLD)]
    assert local == frozen.LOCAL
    data = read_all(source, checkpoint)
    columns = zip(content.entries.name, content.entries.dtype, content.entries.shape, strict=True)
    found = {name: (dtype, tuple(shape), data[name]) for name, dtype, shape in columns}
    assert found == frozen.expected_entries()


def test_an_independent_reader_reads_it(folder: Path) -> None:
    manifest, entries = independent_reader.read(str(folder), frozen.RUN)
    assert entries == frozen.expected_entries()
    assert (manifest["content"]["trees"], manifest["content"]["aliases"]) == (frozen.TREES, frozen.ALIASES)


def test_the_independent_reader_agrees_on_what_is_latest(store: Store) -> None:
    run = Run(store, "gpt")
    for step in (3, 12, 7):
        write_checkpoint(store, step=step)
    root = store.url.removeprefix("file://")
    assert independent_reader.latest(root, "gpt")["attempt"] == str(latest(run).attempt)
    manifest, entries = independent_reader.read(root, "gpt")
    assert manifest["step"] == 12
    assert {name: data for name, (_, _, data) in entries.items()} == {
        name: array.tobytes() for name, array in sample_arrays(12).items()
    }
    store.put(run.keys.tombstone(latest(run).attempt, names.new_ulid(0)), b"{}")
    assert independent_reader.latest(root, "gpt")["step"] == latest(run).step == 7


def test_the_independent_reader_is_independent() -> None:
    tree = ast.parse(Path(independent_reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"base64", "json", "math", "pathlib", "struct", "numpy", "xxhash", "zstandard"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_the_page_names_every_type_and_codec() -> None:
    page = (ROOT / "docs/explanation/format.md").read_text()
    listed = re.search(r"bytes per element:(.*?)\n- `slices`", page, re.DOTALL)
    assert listed
    sizes: dict[str, int] = {}
    pending: list[str] = []
    for name, size in re.findall(r"`(\w+)`|\b(\d+)\b", listed[1]):
        if name:
            pending.append(name)
        else:
            sizes |= dict.fromkeys(pending, int(size))
            pending = []
    assert sizes == ITEM_BYTES
    assert all(f"`{codec}`" in page for codec in CODECS)
