"""Documents are hostile input: whatever is in them, parsing gives a checked document or a typed error."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.clock import system_clock
from ckptstore.errors import CorruptObject, InvalidRequest, UnsupportedFormat
from ckptstore.format import parsing
from ckptstore.format.boxes import check_cover
from ckptstore.format.columns import column, pack, unpack
from ckptstore.format.documents import FORMAT, Lease, Receipt
from ckptstore.format.merging import StoredReceipt, merge
from ckptstore.format.parsing import manifest_bytes, pack_manifest, parse_manifest, parse_sealed, seal
from ckptstore.format.planning import plan_reads
from ckptstore.names import MAX_RANKS, Attempt, new_ulid
from ckptstore.stores import open_store
from tests.ckptstore.format.sealed import KEY, KINDS, SAMPLES
from tests.support.checkpoints import sample_arrays, whole_entries, write_rank

every_kind = pytest.mark.parametrize("kind", SAMPLES)


def body(kind: str) -> Any:
    return json.loads(SAMPLES[kind].split(b"\n")[0])


def parse_body(kind: str, data: bytes) -> Any:
    """Parse JSON with a right checksum around it: what a hostile or faulty writer would leave."""
    if kind == "manifest":
        return parse_manifest(zstandard.compress(data), KEY)
    checksum = xxhash.xxh3_128_hexdigest(data)
    return parse_sealed(data + b'\n{"xxh3_128":"' + checksum.encode() + b'"}\n', KINDS[kind], KEY)


def parse_json(kind: str, value: Any) -> Any:
    return parse_body(kind, json.dumps(value).encode())


@every_kind
def test_the_untouched_document_is_accepted(kind: str) -> None:
    parsed = parse_json(kind, body(kind))
    again = manifest_bytes(parsed) + b"\n" if kind == "manifest" else seal(parsed)
    assert again == SAMPLES[kind], "documents are canonical: parsing and writing gives the same bytes"
    if kind == "manifest":
        assert manifest_bytes(parse_manifest(pack_manifest(parsed), KEY)) == manifest_bytes(parsed)


# Every place in a document, and what does not belong there.


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return copy


WRONG: list[Any] = [
    None, True, "", "x" * 5000, "../../etc/passwd", -1, 2**62 + 1, 2**63, 10**30, 1.5, -0.5, [], {}, [[]], [-1], ["x"],
    {"$": "tuple"}, [0] * 100, "u1:", "u1:!", "u8:" + "/" * 10 + "8=", "u1:AA==", "u9:AA==", "u2:AA==", "i8:AA==",
]  # fmt: skip
FREE = {"trees", "local", "metrics"}  # any JSON, or any names, are legal inside
FREE |= {"policies"}  # checked by those who read them (retention/test_policy.py)


_FIGURES = ("run", "id", "began_at", "trains_at", "restored_s", "generation", "step", "stalled_s", "slowed_s", "ended",
            "ended_at")  # fmt: skip
"""Of a heartbeat: what decides nothing, and is shown as it is."""


@every_kind
def test_every_place_with_every_wrong_value(kind: str) -> None:
    original, accepted = body(kind), set()
    for path in list(places(original))[1:]:
        for wrong in WRONG:

            def assign(parent: Any, key: Any, wrong: Any = wrong) -> None:
                parent[key] = wrong

            try:
                parse_json(kind, replaced(original, path, assign))
            except (CorruptObject, UnsupportedFormat):
                continue
            if not FREE & set(path):
                accepted.add(path)
    # Texts, times and counts, where another value of the same type is as good as this one, and what may be empty.
    assert {path[-1] for path in accepted if isinstance(path[-1], str)} <= {
        "created_at", "at", "nonce", "by", "reason", "holder", "expires_at", "bytes", "world_size", "aliases",
        "raw_bytes", "stored_bytes", "num_entries", "num_shards", "committed", "grace_s", "name", "tombstone", "swept",
        "num_chunks", "problems", "attempts", "version", "parent", *(_FIGURES if kind == "heartbeat" else ()),
    }, accepted  # fmt: skip


@every_kind
def test_unknown_and_missing_fields_are_refused_everywhere(kind: str) -> None:
    original = body(kind)
    for path in places(original):
        if FREE & set(path) or path[-1:] == ("aliases",):
            continue
        at = original
        for key in path:
            at = at[key]
        if not isinstance(at, dict):
            continue
        with pytest.raises(CorruptObject):
            parse_json(kind, replaced(original, (*path, "surprise"), lambda parent, key: parent.update({key: 1})))
        for field in at:
            with pytest.raises(CorruptObject):
                parse_json(kind, replaced(original, (*path, field), lambda parent, key: parent.pop(key)))


@every_kind
def test_versions(kind: str) -> None:
    for version in (FORMAT + 1, 10**9):
        # A newer document may have any shape: only its version counts.
        with pytest.raises(UnsupportedFormat, match=f"version {version}") as caught:
            parse_json(kind, {"format": version, "news": [1, 2, 3]})
        assert "Upgrade" in caught.value.hint
    for wrong in (0, -1, "1", None):
        with pytest.raises(CorruptObject):
            parse_json(kind, {**body(kind), "format": wrong})


def content(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    changed: dict[str, Any] = body("receipt")
    change(changed["content"])
    return changed


def set_at(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


def in_column(*path: Any, change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    """The column at a place, with other numbers."""

    def within(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = pack(column(change(unpack(value[path[-1]]).tolist())))

    return within


def in_chunks(name: str, change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    return in_column("shards", 0, "chunks", name, change=change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["entries"]["name"].pop(), "columns of entries differ"),
        (in_column("slices", "at", change=lambda n: [*n, 0]), "columns of slices differ"),
        (in_chunks("codec", lambda n: n[1:]), "columns of chunks differ"),
        (in_chunks("raw", lambda n: [*n, 1]), "columns of chunks differ"),
        (lambda c: set_at("entries", "name", 0, to=c["entries"]["name"][1])(c), "two entries of one name"),
        (lambda c: c["shards"].append(c["shards"][0]), "two shards of one name"),
        (set_at("shards", 0, "name", to="../../../shard-00000.ckpt"), "shard name"),
        (set_at("shards", 0, "name", to="shard-00000.ckpt\n"), "shard name"),
        (set_at("shards", 0, "rank", to=1), "shard of another rank"),
        (in_chunks("raw", lambda n: [0, *n[1:]]), "raw size is out of bounds"),
        (in_chunks("raw", lambda n: [(64 << 20) + 1, *n[1:]]), "raw size is out of bounds"),
        (in_chunks("stored", lambda n: [0, *n[1:]]), "size is out of bounds"),
        (in_chunks("stored", lambda n: [(64 << 20) + 1, *n[1:]]), "size is out of bounds"),
        (in_chunks("codec", lambda n: [9, *n[1:]]), "names no codec"),
        (set_at("shards", 0, "chunks", "codecs", to=[]), "names no codec"),
        (set_at("shards", 0, "chunks", "codecs", 0, to="gzip"), "codec is unknown"),
        (lambda c: c["shards"][0]["chunks"]["codecs"].append("raw"), "codecs are named twice"),
        (set_at("shards", 0, "chunks", "digest", to=""), "no digest"),
        (lambda c: c["shards"][0]["chunks"].update(digest="AAAA" + c["shards"][0]["chunks"]["digest"]), "no digest"),
        (set_at("entries", "dtype", 0, to="object"), "dtype is unknown"),
        (set_at("entries", "shape", 0, to=[1] * 65), "too many dimensions"),
        (set_at("entries", "shape", 0, to=[-1]), "dimension is out of bounds"),
        (set_at("entries", "shape", 0, to=[0, 1 << 63]), "dimension is out of bounds"),
        (set_at("entries", "shape", 0, to=[1 << 62] * 64), "size is out of bounds"),
        (in_column("slices", "entry", change=lambda n: [99, *n[1:]]), "names no entry"),
        (in_column("slices", "shard", change=lambda n: [1, *n[1:]]), "names no shard"),
        (in_column("slices", "at", change=lambda n: [1 << 40, *n[1:]]), "leaves its shard"),
        (in_column("slices", "at", change=lambda n: [2**63 - 1, *n[1:]]), "leaves its shard"),
        (in_column("slices", "at", change=lambda n: [0] * len(n)), "share bytes"),
        (in_column("slices", "at", change=lambda n: [n[1] - 1, *n[1:]]), "share bytes"),
        (in_column("slices", "box", change=lambda n: n[1:]), "boxes and slices differ"),
        (in_column("slices", "box", change=lambda n: [*n, 1]), "boxes and slices differ"),
        (set_at("slices", "box", to="u1:"), "boxes and slices differ"),
        (in_column("slices", "box", change=lambda n: [1, *n[1:]]), "box leaves its entry"),
        (in_column("slices", "box", change=lambda n: [2**63 - 1, *n[1:]]), "box leaves its entry"),
        (set_at("slices", "at", to="u8:" + "/" * 10 + "8="), "out of bounds"),
        (set_at("slices", "at", to="u4:AA=="), "multiple"),
        (set_at("slices", "at", to="u4:AAAAA"), "base64"),
        (set_at("slices", "at", to="u4:AA AA"), "base64"),
        (set_at("slices", "at", to="i4:AAAAAA=="), "a column of 'i4'"),
        (set_at("slices", "at", to=[0, 1]), "not text"),
    ],
)
def test_contents_that_contradict_themselves(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(CorruptObject, match=message):
        parse_json("receipt", content(change))
    manifest = body("manifest")
    change(manifest["content"])
    if message != "shard of another rank":  # in a manifest, it is some other rank's
        with pytest.raises(CorruptObject, match=message):
            parse_json("manifest", manifest)


@pytest.mark.parametrize(
    ("aliases", "message"),
    [({"model/other": "model/nothing"}, "names no entry"), ({"model/ids": "model/ids"}, "not allowed")],
)
def test_aliases_may_name_entries_of_other_ranks_but_not_missing_entries(aliases: dict[str, str], message: str) -> None:
    assert parse_json("receipt", content(set_at("aliases", to=aliases))).content.aliases == aliases
    manifest = body("manifest")
    manifest["content"]["aliases"] = aliases
    with pytest.raises(CorruptObject, match=message):
        parse_json("manifest", manifest)


@pytest.mark.timeout(120)
def test_hostile_shapes_cost_nothing() -> None:
    """Zero times anything is zero bytes, and 64 dimensions are many corners."""
    entries = 2000
    shapes = [[*[1 << 62] * (i % 64), 0] for i in range(entries)]

    def change(c: dict[str, Any]) -> None:
        c["entries"] = {"name": [f"e{i}" for i in range(entries)], "dtype": ["uint8"] * entries, "shape": shapes}
        columns = {"entry": range(entries), "shard": [0] * entries, "at": [0] * entries}
        boxes = (n for shape in shapes for n in [*[0] * len(shape), *shape])
        c["slices"] = {name: pack(column(numbers)) for name, numbers in {**columns, "box": boxes}.items()}

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receipt = parse_json("receipt", content(change))
    check_cover(receipt.content)
    assert plan_reads(receipt.content, whole_entries(receipt.content.entries.name)) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10, "KiB"


def test_documents_about_the_wrong_thing() -> None:
    for field, value in (("step", 8), ("run", "../x"), ("run", "a~b"), ("attempt", "000000000007-"), ("kind", "lease")):
        with pytest.raises(CorruptObject):
            parse_json("receipt", {**body("receipt"), field: value})
    with pytest.raises(CorruptObject, match="one receipt per rank"):
        parse_json("manifest", {**body("manifest"), "world_size": 2})
    for rank, reason in ((-1, r">= 0 - at `\$.rank`"), (1, "outside the world")):
        with pytest.raises(CorruptObject, match=reason):
            parse_json("receipt", {**body("receipt"), "rank": rank})


@pytest.mark.parametrize("ranks", [MAX_RANKS + 1, 2**40])
def test_more_ranks_than_names_allow_are_refused(ranks: int) -> None:
    outcome = body("outcome")
    summary = outcome["committed"]["summary"]
    for allowed in (1, MAX_RANKS):
        assert parse_json("receipt", {**body("receipt"), "world_size": allowed})
        summary["world_size"] = allowed
        assert parse_json("outcome", outcome)
    summary["world_size"] = ranks
    for kind, document in (("receipt", {**body("receipt"), "world_size": ranks}), ("outcome", outcome)):
        with pytest.raises(CorruptObject, match=rf"<= {MAX_RANKS} - at .*world_size"):
            parse_json(kind, document)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting(kind: str, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    with pytest.raises(CorruptObject):
        parse_body(kind, b'{"format":1,"surprise":' + deep + b"}")
    if kind == "receipt":
        receipt = SAMPLES[kind].split(b"\n")[0].replace(b'"local":{', b'"local":{"deep":' + deep + b",")
        with contextlib.suppress(CorruptObject):
            parse_body(kind, receipt)


def test_bombs_are_not_unpacked() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(bytes(1 << 30))
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptObject, match="claims to decompress"):
        parse_manifest(bomb, KEY)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - made < 64 << 10, f"KiB, from {before}"
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(SAMPLES["manifest"])
    with pytest.raises(CorruptObject, match="claims to decompress"):
        parse_manifest(unsized, KEY)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_a_sealed_document_is_sealed(kind: str) -> None:
    data = SAMPLES[kind]
    for at in range(0, len(data), max(1, len(data) // 200)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CorruptObject):
                parse_sealed(bytes(flipped), KINDS[kind], KEY)
    for damaged in (b"", data[:-1], data + b"\n", data + data, data.split(b"\n")[0], b"\n" + data):
        with pytest.raises(CorruptObject, match=KEY):
            parse_sealed(damaged, KINDS[kind], KEY)


def test_too_large_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_SEALED_BYTES", 10)
    with pytest.raises(CorruptObject, match="larger than"):
        parse_sealed(SAMPLES["lease"], Lease, KEY)


@pytest.mark.parametrize("kind", SAMPLES)
@given(data=st.data())
def test_fuzzed_bytes(kind: str, data: st.DataObject) -> None:
    original = SAMPLES[kind].split(b"\n")[0]
    begin = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(begin, min(len(original), begin + 40)))
    tokens = st.sampled_from([b"null", b"-1", b"1e999", b'"', b"[[", b"{}", b"\xff", b"\\ud800", b"9" * 400, b"\x00"])
    inserted = data.draw(st.lists(tokens | st.binary(max_size=6), max_size=3).map(b"".join))
    candidate = original[:begin] + inserted + original[end:]
    with contextlib.suppress(CorruptObject, UnsupportedFormat):
        parse_body(kind, candidate)


@given(st.binary(max_size=200))
def test_fuzzed_noise(noise: bytes) -> None:
    for kind in SAMPLES:
        with pytest.raises((CorruptObject, UnsupportedFormat)):
            parse_body(kind, noise)
    for parse in (lambda: parse_manifest(noise, KEY), lambda: parse_sealed(noise, Receipt, KEY)):
        with pytest.raises(CorruptObject):
            parse()


def test_metrics_must_be_numbers_that_json_has() -> None:
    receipt = parse_json("receipt", body("receipt"))
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(InvalidRequest, match="finite"):
            seal(msgspec.structs.replace(receipt, metrics={"loss": value}))


def test_what_no_reader_takes_is_not_merged() -> None:
    """Two ranks that claim the same shard would make a manifest that cannot be read back."""
    store = open_store("memory://clash")
    attempt, arrays = Attempt(1, new_ulid(system_clock())), sample_arrays()
    first = write_rank(store, "gpt", attempt, {"model/ids": arrays["model/ids"]}, 0, 2)
    second = write_rank(store, "gpt", attempt, {"model/half": arrays["model/half"]}, 1, 2)
    shard = msgspec.structs.replace(second.receipt.content.shards[0], name="shard-00000.ckpt")
    clash = msgspec.structs.replace(
        second.receipt, content=msgspec.structs.replace(second.receipt.content, shards=[shard])
    )
    with pytest.raises(CorruptObject, match="two shards of one name"):
        merge([first, StoredReceipt.of(clash, seal(clash))])


@pytest.mark.parametrize("kind", SAMPLES)
def test_extensions(kind: str) -> None:
    plain = {"note": {"any": [1, None]}, "critically": 1}
    assert parse_json(kind, {**body(kind), "extensions": plain}).extensions == plain
    for name in ("critical.", "critical.boundary"):
        # As with a newer version, the rest may have any shape.
        with pytest.raises(UnsupportedFormat, match=name) as caught:
            parse_json(kind, {"format": FORMAT, "news": 1, "extensions": {**plain, name: None}})
        assert "Upgrade" in caught.value.hint
    strange: list[Any] = [None, [], "critical.x", 1]
    for wrong in strange:
        with pytest.raises(CorruptObject):
            parse_json(kind, {**body(kind), "extensions": wrong})


def test_a_manifest_has_the_extensions_of_the_lowest_rank_that_gives_them() -> None:
    store, attempt = open_store("memory://extensions"), Attempt(1, new_ulid(system_clock()))
    ranks = [write_rank(store, "gpt", attempt, sample_arrays() if rank == 0 else {}, rank, 3) for rank in range(3)]
    given: list[dict[str, Any]] = [{"a": 0}, {"b": 1, "a": 1}, {"b": 2, "c": 2}]
    changed = [
        stored._replace(receipt=msgspec.structs.replace(stored.receipt, extensions=extensions))
        for stored, extensions in zip(ranks, given, strict=True)
    ]
    assert (merge(changed).extensions, merge(ranks).extensions) == ({"a": 0, "b": 1, "c": 2}, {})


# In a process of its own: with the functions of msgspec in the place of ours it dies by SIGSEGV.
_PROGRAM = """
import sys, threading
import msgspec
from ckptstore.format.decoding import convert, decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
for number in range(900):
    inner = msgspec.defstruct("Inner", [(f"field_{n}", int | None, None) for n in range(20)])
    outer = msgspec.defstruct("Outer", [("inners", list[inner]), ("by_name", dict[str, inner])])
    data = b'{"inners": [{"field_7": 1}], "by_name": {"a": {"field_19": 2}}}'
    plain = msgspec.json.decode(data)
    packed = msgspec.msgpack.encode(plain)
    ways = (lambda: decode_json(data, outer), lambda: decode_msgpack(packed, outer), lambda: convert(plain, outer))
    way, start = ways[number % 3], threading.Barrier(4)

    def decode():
        start.wait()
        found = way()
        assert found.inners[0].field_7 == 1 and found.by_name["a"].field_19 == 2

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_meet_a_type_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
