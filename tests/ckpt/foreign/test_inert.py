"""Damaged files and files that expand to gigabytes: an error of ours, within limits on memory and processor time."""

from __future__ import annotations

import codecs
import json
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from ckpt.foreign.dcp_folder import read_dcp
from ckpt.foreign.importing import ForeignFormat, read_foreign
from ckpt.foreign.inert import Budget, Malformed, PickleReader
from ckptstore.errors import BadInput, Damaged, UnsupportedObject

_DEADLINE_S = 600
_LIMITED = """
import json, os, resource, sys
from pathlib import Path
from ckpt.foreign.importing import ForeignFormat, read_foreign
from ckptstore.errors import CkptError
import ckpt.foreign.dcp_folder

def limited_import(path):
    taken = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    try:
        read_foreign(path, ForeignFormat.DCP if path.is_dir() else ForeignFormat.TORCH, "model")
        found = {"code": "", "message": "", "hint": ""}
    except CkptError as error:
        found = {"code": error.code, "message": error.message, "hint": error.hint}
    path.with_name(path.name + ".json").write_text(json.dumps(found))

for path in sorted(Path(sys.argv[1]).glob("*")):
    child = os.fork()
    if child == 0:
        try:
            limited_import(path)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
"""
"""Imports of everything in a folder, each under 512 MiB more than the program takes, and a minute of processor time."""


class Call:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def nested(kind: type[Any], depth: int) -> Any:
    """Containers, each of which holds the one below it four times."""
    item: Any = 1
    for _ in range(depth):
        item = kind([item] * 4)
    return item


TEXT = "a" * (1 << 20)
MANY = list(range(100_000))
TIMES = 5_000
STATES: dict[str, tuple[str, Callable[[], Any]]] = {
    "lists": ("unsupported_object", lambda: nested(list, 13)),
    "options of an optimizer": (
        "unsupported_object",
        lambda: {"state.w.step": 1, "param_groups.w.lr": nested(list, 13)},
    ),
    "texts": ("unsupported_object", lambda: [TEXT] * TIMES),
    "bytes": ("unsupported_object", lambda: [Call(codecs.encode, TEXT, "latin1") for _ in range(TIMES)]),
    "hex": ("corrupt", lambda: Call(codecs.encode, Call(codecs.encode, TEXT, "latin1"), "hex")),
    "sets": ("unsupported_object", lambda: [Call(set, MANY) for _ in range(TIMES)]),
    "counters": ("unsupported_object", lambda: [Call(Counter, dict.fromkeys(MANY, 1)) for _ in range(2)] * TIMES),
    "ordered dicts": ("corrupt", lambda: [Call(OrderedDict, [(i, i) for i in range(9)]) for _ in range(9)]),
    "sizes": ("corrupt", lambda: [Call(torch.Size, MANY) for _ in range(TIMES)]),
    "a bytearray": ("unsupported_object", lambda: Call(bytearray, 1 << 34)),
    "a storage": ("corrupt", lambda: Call(torch.UntypedStorage, 1 << 34)),
    "a tensor": ("unsupported_object", lambda: Call(torch.Tensor, 1 << 34)),
    "a key": ("unsupported_object", lambda: keyed([nested(tuple, 40)])),
    "equal hashes": ("corrupt", lambda: keyed([i * ((1 << 61) - 1) for i in range(1, 200_000)])),
    "unknown objects": ("unsupported_object", lambda: chained(MANY, 20_000)),
    "nesting": ("unsupported_object", lambda: deep(2_000)),
}


def keyed(keys: list[Any]) -> bytes:
    """The pickle of a dict with these keys, which are never hashed here."""
    items = [pickle.dumps(key, protocol=2)[2:-1] + b"K\x01" for key in keys]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def chained(shared: list[Any], times: int) -> bytes:
    """A pickle of an unknown object that is called again and again with the same arguments."""
    args = pickle.dumps(tuple(shared), protocol=2)[2:-1]
    return b"\x80\x02" + args + b"r\xff\x00\x00\x00" + b"0cno\nname\n" + b"j\xff\x00\x00\x00R" * times + b"."


def deep(depth: int) -> bytes:
    """A pickle, as the pickler itself cannot go as deep."""
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def torch_file(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return path


def pieces() -> Metadata:
    """Thousands of tensors that share thousands of pieces."""
    size = torch.Size([1 << 40])
    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(3_000)]
    tensor = TensorStorageMetadata(TensorProperties(), size, chunks)
    return Metadata({f"w{i}": tensor for i in range(3_000)}, storage_data={})


FOLDERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "memo": ("corrupt", lambda: b"\x80\x04}r" + (1 << 27).to_bytes(4, "little") + b"0N."),
    "pieces": ("unsupported_object", lambda: pickle.dumps(pieces())),
    "layout": ("corrupt", lambda: pickle.dumps(Metadata(cast(Any, {"w": Call(_get_layout, nested(list, 20))})))),
    "path": (
        "corrupt",
        lambda: pickle.dumps(Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([0]), [])},
                                      planner_data={"w": ("a",) * 100_000}, storage_data={})),
    ),
    "length": ("corrupt", lambda: b"\x80\x04\x96" + (1 << 34).to_bytes(8, "little") + b"."),
}  # fmt: skip


def pickled(state: Any) -> bytes:
    return state if isinstance(state, bytes) else pickle.dumps({"model": {"w": state}}, protocol=2)


def repacked(path: Path) -> None:
    torch.save({"w": torch.zeros(10_000)}, path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as plain, zipfile.ZipFile(path, "w") as packed:
        for info in plain.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/" in info.filename else zipfile.ZIP_STORED
            packed.writestr(info.filename, plain.read(info), kind)
    path.with_suffix(".plain").unlink()


Found = Callable[[str], Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The error of each import, by name. One process imports all, as loading torch takes seconds."""
    folder = tmp_path_factory.mktemp("bombs")
    for name, (_, make) in STATES.items():
        assert torch_file(folder / name, pickled(make())).stat().st_size < 8 << 20
    for name, (_, make_metadata) in FOLDERS.items():
        (folder / name).mkdir()
        (folder / name / ".metadata").write_bytes(make_metadata())
    large = b"\x80\x02X" + (100 << 20).to_bytes(4, "little") + bytes(100 << 20) + b"."
    assert torch_file(folder / "inflated", large, zipfile.ZIP_DEFLATED).stat().st_size < 1 << 20
    repacked(folder / "repacked")
    subprocess.run([sys.executable, "-c", _LIMITED, str(folder)], check=True, timeout=_DEADLINE_S)
    return lambda name: json.loads((folder / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STATES, *FOLDERS])
def test_a_small_file_of_a_large_state_is_refused(found: Found, name: str) -> None:
    error = found(name)
    assert (error["code"], bool(error["hint"])) == ({**STATES, **FOLDERS}[name][0], True), error
    assert "Memory" not in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inflated", "repacked"])
def test_compressed_records_are_refused_before_they_are_unpacked(found: Found, name: str) -> None:
    error = found(name)
    assert (error["code"], "compressed" in error["message"]) == ("unsupported_object", True), error


def test_a_budget_grows_with_the_file_up_to_a_limit() -> None:
    data, budget = b"\x80\x02(" + b"}" * 100_000 + b"t.", Budget("x", 1 << 21)
    with pytest.raises(UnsupportedObject, match="too many objects"):
        PickleReader(data, "x", {}, budget).read()
    budget = Budget("x", 1 << 21)
    budget.grant(len(data))
    assert len(PickleReader(data, "x", {}, budget).read()) == 100_000
    with pytest.raises(UnsupportedObject, match="too many objects"):
        PickleReader(data, "x", {}, budget).read()
    with pytest.raises(UnsupportedObject, match="limit is 100"):
        Budget("x", 100).grant(101)


def test_metadata_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(UnsupportedObject, match="limit is"):
        read_dcp(tmp_path, "model")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x02", b"\x80\x02.", b"}u.", b"K\x01K\x02s.", b"h\x05.", b"\x87.", b"\xff.", b"X\xff\xff\xff\xffa.",
     b"\x8b\xff\xff\xff\xff.", b"]]b.", b"K\x01)R.", b"K\x01Q.", b"}]K\x01s.", b"(", b"cos\nsystem"],
)  # fmt: skip
def test_damaged_instructions_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        PickleReader(data, "x", {}, Budget("x", 1 << 20)).read()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_plain_values_of_every_protocol_are_read(protocol: int) -> None:
    value: dict[Any, Any] = {
        "a": [1, -1, 1 << 70, -(1 << 2100), 2.5, True, False, None, ""],
        3: ("x" * 300, (), (1,), (1, 2, 3, 4)),
    }
    value["same"] = [value["a"], value["a"]]
    data = pickle.dumps({**value, **({"b": b"\x00\xff" * 300} if protocol > 2 else {})}, protocol)
    found = PickleReader(data, "x", {}, Budget("x", 1 << 24)).read()
    assert found == pickle.loads(data)
    assert found["same"][0] is found["same"][1]


dcp: Any = torch.distributed.checkpoint  # it exports without saying so

STATE = {
    "model": {"w": torch.arange(12.0).reshape(4, 3), "v": torch.arange(12.0).reshape(4, 3).t()},
    "optim": {"state": {0: {"m": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
    "text": "x",
}


def write(folder: Path, name: str) -> tuple[Path, Path, ForeignFormat]:
    """What is imported, the file of it that is changed, and its format."""
    if name == "a.pt":
        torch.save(STATE, folder / name)
        return folder / name, folder / name, ForeignFormat.TORCH
    if name == "a.safetensors":
        save_file({"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)}, folder / name)
        return folder / name, folder / name, ForeignFormat.SAFETENSORS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
    return folder, folder / name, ForeignFormat.DCP


def mutations(good: bytes, count: int) -> Iterator[bytes]:
    """Copies with a few bytes changed, taken out or put in; the same ones every time."""
    chance = random.Random(7)
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.choice([1, 1, 1, 2, 5])):
            at, kind = chance.randrange(len(data)), chance.random()
            if kind < 0.6:
                data[at] = chance.randrange(256)
            elif kind < 0.8:
                del data[at : at + chance.randrange(1, 9)]
            else:
                data[at:at] = chance.randbytes(chance.randrange(1, 5))
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")  # torch's, about what it reads
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", ".metadata", "__0_0.distcp"])
def test_any_damage_is_an_error_of_ours_or_harmless(tmp_path: Path, name: str) -> None:
    path, file, kind = write(tmp_path, name)
    refused = 0
    for data in mutations(file.read_bytes(), 200):
        file.write_bytes(data)
        try:
            foreign = read_foreign(path, kind, "model")
            assert foreign.raw_bytes <= sum(f.stat().st_size for f in tmp_path.iterdir())
            for part in foreign.parts:
                part.read(0, memoryview(bytearray(part.slice.bytes)))
        except (BadInput, Damaged):
            refused += 1
    assert refused > 20
