"""A second reader, written from docs/explanation/format.md alone. It imports nothing of ours, and trusts no input."""

# ruff: noqa: B905

import base64
import json
import math
import pathlib
import struct

import numpy as np
import xxhash
import zstandard

Entries = dict[str, tuple[str, tuple[int, ...], bytes]]
ITEM = {"complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2}
ITEM |= {"int16": 2, "uint16": 2, "complex32": 4, "float32": 4, "int32": 4, "uint32": 4}  # everything else: 1

KNOWN = {"critical.bases", "critical.optimizer"}


def column(text: str) -> list[int]:
    width, data = text.split(":")
    assert width in ("u1", "u2", "u4", "u8"), "not a column"
    numbers: list[int] = np.frombuffer(base64.b64decode(data, validate=True), f"<{width}").tolist()
    return numbers


def unseal(path: pathlib.Path) -> dict:  # type: ignore[type-arg]
    body, trailer = path.read_bytes().split(b"\n", 1)
    assert trailer == b'{"xxh3_128":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode(), f"{path} is damaged"
    document: dict = json.loads(body)  # type: ignore[type-arg]
    return understood(document)


def understood(document: dict) -> dict:  # type: ignore[type-arg]
    assert document["format"] <= 2, "a newer format"
    unknown = {name for name in document.get("extensions", {}) if name.startswith("critical.")} - KNOWN
    assert not unknown, "an unknown extension"
    return document


def generation(attempt: str) -> int:
    return int(attempt[:6]) if attempt[6] == "-" else 0


def latest(root: str, run: str) -> dict:  # type: ignore[type-arg]
    outcomes = [unseal(path) for path in pathlib.Path(root, run, "commits").iterdir()]
    hidden = {path.name.split(".")[0] for path in pathlib.Path(root, run).glob("tombstones/*.json")}
    newest = {path.name[:6]: path for path in sorted(pathlib.Path(root, run).glob("dead/*.json"))}
    hidden |= {attempt for path in newest.values() for attempt in unseal(path)["attempts"]}
    visible = [o for o in outcomes if o["committed"] is not None and o["attempt"] not in hidden]
    return max(visible, key=lambda o: (generation(o["attempt"]), o["step"], o["at"], o["attempt"]))


def decode(codec: str, stored: bytes, size: int) -> bytes:
    if codec == "raw":
        return stored
    if codec == "zstd":
        return zstandard.ZstdDecompressor().decompress(stored)
    dtype, words, at = codec.removeprefix("float-split/"), [], 0
    width, left = ITEM[dtype], size // ITEM[dtype]

    def plane(num_bytes: int, packed: int) -> np.ndarray:
        nonlocal at
        data = stored[at : at + (packed or num_bytes)]
        at += -(-len(data) // 8) * 8
        return np.frombuffer(zstandard.decompress(data) if packed else data, np.uint8).astype(np.uint32)

    while left >= 8:
        n, low, rest, codes, escapes, base, mode = struct.unpack_from("<IIIIHBBxxxx", stored, at)
        at, left = at + 24, left - n
        mixed, low = not low, plane(2 * n, low) if width == 4 else np.zeros(2 * n, np.uint32)
        q = plane(n, rest).reshape(-1, 2)
        r = (q if mode & 2 else q & 0x7F | q[:, ::-1] & 0x80).T.reshape(-1)
        positions, escaped = (plane(n, 0).astype(np.uint8) for n in (4 * escapes, 2 * escapes))
        c = plane(n // 2 if mode & 1 else n, codes)
        c = np.concatenate([c & 15, c >> 4]) + base if mode & 1 else c.reshape(-1, 2).T.reshape(-1)
        high = c << 8 | r if mode & 2 else (r & 0x80) << 8 | c << 7 | r & 0x7F
        high[positions.view("<u4")] = escaped.view("<u2")
        if width == 4:
            lows = low.astype(np.uint8).view("<u2").reshape(-1, 2)
            lows[:, 1] ^= (high[::2] * mixed).astype("<u2")
            high = high.reshape(-1, 2).T.reshape(-1) << 16 | lows.T.reshape(-1)
        words.append(high.astype(f"<u{width}").tobytes())
    assert at + left * width == len(stored)
    return b"".join(words) + stored[at:]


def undelta(stored: bytes, base: bytes) -> bytes:
    digest, width = struct.unpack_from("<16sB", stored)
    old = np.frombuffer(base, f"<u{width}")
    limits, at, words = np.frombuffer(stored, old.dtype, 3, 17), 17 + 3 * width, old.copy()

    def numbers(n: int) -> np.ndarray:
        nonlocal at
        k, size = struct.unpack_from("<BI", stored, at)
        begin, end = at + 5, at + 5 + size
        unary, k = (zstandard.decompress(stored[begin:end]), k - 128) if k >= 128 else (stored[begin:end], k)
        high = [len(zeros) for zeros in "".join(f"{byte:08b}" for byte in unary).split("1")[:-1]]
        at = end + -(-n * k // 8)
        bits = "".join(f"{byte:08b}" for byte in stored[end:at])
        low = [int("0" + bits[number * k : (number + 1) * k][::-1], 2) for number in range(n)]
        return np.array([a << k | b for a, b in zip(high, low, strict=True)], np.uint64)

    for limit in (*limits, None):
        among = np.arange(len(old)) if limit is None else np.flatnonzero(old * old.dtype.type(2) < limit)
        (n,) = struct.unpack_from("<I", stored, at)
        at += 4
        where = among[np.cumsum(numbers(n).astype(np.int64) + 1) - 1]
        z = (numbers(n) + np.uint64(1)).astype(old.dtype)
        words[where] += (z >> 1) ^ (0 - (z & 1)).astype(z.dtype)
    assert (at, xxhash.xxh3_128_digest(words.tobytes())) == (len(stored), digest), "a delta is damaged"
    return words.tobytes()


def cast(w: np.ndarray, dtype: str) -> np.ndarray:
    nan = w & 0x7FFFFFFF > 0x7F800000
    if dtype == "bfloat16":
        even = (w.astype(np.uint64) + 0x7FFF + (w >> 16 & 1)) >> 16
        return np.where(nan, 0xFFFF, even).astype("<u2")
    with np.errstate(all="ignore"):
        rounded = w.view("<f4").astype("<f2").view("<u2")
    return np.where(nan, w >> 16 & 0x8000 | 0x7E00 | w >> 13 & 0x3FF, rounded).astype("<u2")


def read(root: str, run: str) -> tuple[dict, Entries]:  # type: ignore[type-arg]
    outcome = latest(root, run)
    folder = pathlib.Path(root, run, "attempts", outcome["attempt"])
    packed = (folder / "manifest.json.zst").read_bytes()
    assert xxhash.xxh3_128_hexdigest(packed) == outcome["committed"]["digest"], "the manifest is damaged"
    manifest = understood(json.loads(zstandard.decompress(packed)))
    content, streams = manifest["content"], []
    for shard in content["shards"]:
        at, stream, referenced = 0, b"", shard.get("references")
        others = {}
        if referenced is not None:
            rows = zip(*(column(referenced[c]) for c in ("chunk", "attempt", "offset")))
            others = {chunk: (referenced["attempts"][attempt], offset) for chunk, attempt, offset in rows}
        bases: dict[int, list[tuple]] = {}  # type: ignore[type-arg]
        if (needed := shard.get("bases")) is not None:
            assert "critical.bases" in manifest["extensions"]
            table, places = needed["chunks"], needed["references"]
            marks = base64.b64decode(table["digest"], validate=True)
            found = [column(table[c]) for c in ("stored", "codec")] + [column(places[c]) for c in ("attempt", "offset")]
            for j, (chunk, size, kind, attempt, offset) in enumerate(zip(column(needed["of"]), *found)):
                digest, name = marks[16 * j : 16 * j + 16], table["codecs"][kind]
                bases.setdefault(chunk, []).append((places["attempts"][attempt], offset, size, digest, name))
        chunks, digests = shard["chunks"], base64.b64decode(shard["chunks"]["digest"], validate=True)
        for i, (raw, stored, codec) in enumerate(zip(*(column(chunks[c]) for c in ("raw", "stored", "codec")))):
            expected = digests[16 * i : 16 * i + 16]
            holder, offset = others.get(i, (outcome["attempt"], at))
            piece = b""
            own = (holder, offset, stored, expected, chunks["codecs"][codec])
            for there, begin, size, mark, name in [*bases.get(i, []), own]:
                with (folder.parent / there / shard["name"]).open("rb") as file:
                    file.seek(begin)
                    data = file.read(size)
                assert xxhash.xxh3_128_digest(data) == mark, "a chunk is damaged"
                piece = undelta(data, piece) if name == "delta" else decode(name, data, raw)
            stream += piece
            at += 0 if i in others else stored
        streams.append(stream)
    names, dtypes, shapes = (content["entries"][c] for c in ("name", "dtype", "shape"))
    arrays = [np.zeros([*shape, ITEM.get(dtype, 1)], np.uint8) for shape, dtype in zip(shapes, dtypes)]
    boxes, derived = iter(column(content["slices"]["box"])), set(column(content["slices"].get("derived", "u1:")))
    for i, (entry, number, at) in enumerate(zip(*(column(content["slices"][c]) for c in ("entry", "shard", "at")))):
        offsets, sizes = ([next(boxes) for _ in shapes[entry]] for _ in "os")
        region = arrays[entry][tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        size = math.prod(region.shape)
        if i in derived:
            elements = cast(np.frombuffer(streams[number], "<u4", size // 2, at), dtypes[entry])
            region[...] = elements.view(np.uint8).reshape(region.shape)
            continue
        region[...] = np.frombuffer(streams[number], np.uint8, size, at).reshape(region.shape) if size else 0
    assert next(boxes, None) is None, "more boxes than slices"
    return manifest, {n: (d, tuple(s), a.tobytes()) for n, d, s, a in zip(names, dtypes, shapes, arrays)}
