import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import latest, list_checkpoints, list_runs
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.format.documents import Content
from ckptstore.names import new_ulid
from ckptstore.reading.safetensors import TYPES
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.foreign.conftest import given_back, of_types, refused
from tests.support.checkpoints import sample_arrays
from tests.support.command_line import clean_environment, invoke, succeed
from tests.support.disks import small_file_system
from tests.support.entries import ENTRIES, TREES, tensor_bytes, write_entries
from tests.support.forking import COMMAND_LINE, fork
from tests.support.waiting import wait_until


def content_of(folder: Path, run: str) -> Content:
    store = open_store(str(folder))
    return read_manifest(StoreSource(store), list_checkpoints(Run(store, run))[0]).content


def write_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_safetensors_file_becomes_a_model(store: Path, tmp_path: Path) -> None:
    tensors = {name.removeprefix("model/"): torch.tensor(a) for name, a in sample_arrays(3).items()}
    save_file(tensors, tmp_path / "a.safetensors")
    done = succeed("import", tmp_path / "a.safetensors", "gpt@7", "--store", store, "-o", "json")
    assert done.json["id"].startswith("gpt@7.")
    assert (done.json["items"], done.json["num_entries"], done.json["format"]) == (["model"], 5, "safetensors")
    assert invoke("verify", "gpt@7", "--store", store).code == 0
    state = given_back(store, "gpt")
    assert list(state) == ["model"]
    assert {name: tensor_bytes(t) for name, t in state["model"].items()} == {
        name: tensor_bytes(t) for name, t in tensors.items()
    }


def test_an_import_makes_the_stores_folder_as_a_save_does(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    store = tmp_path / "new" / "store"
    assert invoke("import", tmp_path / "missing.safetensors", "gpt@7", "--store", store).code
    assert not store.exists()
    assert invoke("import", tmp_path / "a.safetensors", "gpt@7", "--store", store).code == 0
    assert invoke("verify", "gpt@7", "--store", store).code == 0


def test_a_summary_of_the_import_is_printed(store: Path, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    done = invoke("import", tmp_path / "a.safetensors", "gpt@7", "--store", store)
    assert done.stdout.startswith(f"Imported 1 entry (16 B) from {tmp_path}/a.safetensors as gpt@7.")


def test_every_element_type_survives_export_and_import(store: Path, tmp_path: Path) -> None:
    raw = of_types(store, TYPES)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert invoke("export", "r@1", "--to", first, "--store", store).code == 0
    assert invoke("import", first, "copy@1", "--store", store).code == 0
    assert invoke("export", "copy@1", "--to", second, "--store", store).code == 0
    found = load_file(second)
    assert {name: tensor_bytes(found[f"model/{name}"]) for name in TYPES} == raw


def test_an_own_export_falls_into_its_items_again(tmp_path: Path) -> None:
    folder, to = tmp_path / "store", tmp_path / "a.safetensors"
    write_entries(open_store(str(folder)), ENTRIES, TREES, {"model/head": "model/emb"})
    assert invoke("export", "r@1", "--to", to, "--store", folder).code == 0
    assert invoke("import", to, "copy@1", "--store", folder).code == 0
    content = content_of(folder, "copy")
    assert (sorted(content.trees), content.aliases) == (["model", "optim"], {"model/head": "model/emb"})
    state = given_back(folder, "copy")
    assert state["model"]["head"].data_ptr() == state["model"]["emb"].data_ptr()
    assert state["optim"]["m"].shape == (0, 4)


def test_tied_weights_of_the_safetensors_package_stay_tied(store: Path, tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    save_model(torch.nn.Sequential(layer, layer), str(tmp_path / "a.safetensors"))
    assert invoke("import", tmp_path / "a.safetensors", "gpt@7", "--store", store).code == 0
    state = given_back(store, "gpt")["model"]
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert torch.equal(state["0.weight"], layer.weight)


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_hugging_face_folder_or_its_index_becomes_a_model(folder: Path, tmp_path: Path, name: str) -> None:
    args = ("--format", "huggingface", "--max-shard-size", "1MB", "--store", folder)
    assert invoke("export", "gpt@40", "--to", tmp_path / "hf", *args).code == 0
    done = invoke("import", tmp_path / "hf" / name, "copy@1", "--item", "net", "--store", folder, "-o", "json")
    assert (done.code, done.json["items"]) == (0, ["net"])
    state = given_back(folder, "copy")["net"]
    for entry, array in sample_arrays(40).items():
        assert tensor_bytes(state[entry.removeprefix("model/")]) == array.tobytes()


def test_a_step_that_has_a_checkpoint_is_not_replaced(folder: Path, filled: Store, tmp_path: Path) -> None:
    run = Run(filled, "gpt")
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    before = list_checkpoints(run)
    done = invoke("import", tmp_path / "a.safetensors", "gpt@40", "--store", folder, "-o", "json")
    assert (done.code, done.error["code"], list_checkpoints(run)) == (2, "invalid_request", before)


def test_no_import_moves_a_run_back_to_an_earlier_step(folder: Path, filled: Store, tmp_path: Path) -> None:
    run = Run(filled, "gpt")
    newest = latest(run)
    begin_generation(run, Session(new_ulid(system_clock()), newest.attempt))
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    done = invoke("import", tmp_path / "a.safetensors", "gpt@5", "--store", folder)
    assert (done.code, "before step 40" in done.stderr) == (2, True), done.stderr
    assert latest(run) == newest
    assert invoke("import", tmp_path / "a.safetensors", "gpt@50", "--store", folder).code == 0
    assert latest(run).step == 50


@pytest.mark.parametrize("to", ["gpt@latest", "gpt", "../x@1", "gpt@1.01ARZ3NDEKTSV4RRFFQ69G5FAV"])
def test_a_name_that_is_no_new_checkpoint_is_refused(store: Path, tmp_path: Path, to: str) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    assert invoke("import", tmp_path / "a.safetensors", to, "--store", store).code == 2
    assert list_runs(open_store(str(store))) == []


def test_a_path_that_tells_no_format_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.txt").touch()
    for path in (tmp_path / "missing", tmp_path / "folder", tmp_path / "x.txt"):
        assert refused(store, path)["code"] == "invalid_request"


def test_a_daemon_cannot_import(tmp_path: Path) -> None:
    done = invoke("import", tmp_path, "r@1", "--format", "safetensors", "--url", "http://127.0.0.1:9")
    assert (done.code, "--store" in done.stderr) == (2, True)


PLACE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json", b"[1]", b'{"x": 3}', b'{"\xff": 3}', {"x": {"dtype": "F32", "shape": [2]}},
        {"x": {**PLACE, "shape": [-2]}}, {"x": {**PLACE, "shape": [3]}}, {"x": {**PLACE, "shape": [2**40, 2**40]}},
        {"x": {**PLACE, "data_offsets": [4, 12]}}, {"x": {**PLACE, "data_offsets": [0, 2**63]}},
        {"x": PLACE, "y": PLACE}, {}, {"__metadata__": {"a": 1}, "x": PLACE},
    ],
)  # fmt: skip
def test_a_malformed_header_is_damage(store: Path, tmp_path: Path, header: object) -> None:
    assert refused(store, write_header(tmp_path / "a.safetensors", header, bytes(8)))["code"] == "corrupt"


@pytest.mark.parametrize("length", [0, 7, 8, 50, -1])
def test_a_truncated_file_is_damage(store: Path, tmp_path: Path, length: int) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:length])
    assert refused(store, tmp_path / "a.safetensors")["code"] == "corrupt"


def test_a_header_that_claims_the_memory_of_the_machine_is_damage(store: Path, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert refused(store, tmp_path / "a.safetensors")["code"] == "corrupt"


def test_an_element_type_that_we_lack_is_named(store: Path, tmp_path: Path) -> None:
    path = write_header(tmp_path / "a.safetensors", {"x": {**PLACE, "dtype": "F4"}}, bytes(8))
    error = refused(store, path)
    assert (error["code"], "F4" in error["message"]) == ("unsupported_object", True)


def test_nothing_is_no_checkpoint(store: Path, tmp_path: Path) -> None:
    assert refused(store, write_header(tmp_path / "a.safetensors", {}))["code"] == "invalid_request"


@pytest.mark.parametrize(
    "tensors", [{"model/a": 1, "model/a/b": 1}, {"model/a/b": 1, "model/a": 1}, {"model": 1, "model/a": 1}, {"m/$": 1}]
)
def test_names_that_exclude_each_other_are_damage(store: Path, tmp_path: Path, tensors: Mapping[str, int]) -> None:
    save_file({name: torch.zeros(n) for name, n in tensors.items()}, tmp_path / "a.safetensors", {"checkpoint": "x"})
    assert refused(store, tmp_path / "a.safetensors")["code"] == "corrupt"


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"w": "../secret.safetensors"}}, {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": "sub/a.safetensors"}}, {"weight_map": {"w": "other.txt"}},
        {"weight_map": {"w": "missing.safetensors"}}, {"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}},
        {"weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}, {"weight_map": {"w": 3}}, {"weight_map": []},
        {},
    ],
)  # fmt: skip
def test_a_malformed_index_is_damage(store: Path, tmp_path: Path, index: object) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "secret.safetensors")
    save_file({"w": torch.zeros(4)}, hub / "a.safetensors")
    save_file({"w": torch.zeros(4), "x": torch.zeros(1)}, hub / "b.safetensors")  # w is in both
    (hub / "other.txt").touch()
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(store, hub)["code"] == "corrupt"


def test_a_store_that_is_full_keeps_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    save_file({"w": torch.from_numpy(rng.integers(0, 1 << 62, (500_000,)))}, tmp_path / "a.safetensors")
    with small_file_system(tmp_path / "disk", "2m") as disk:
        done = invoke("import", tmp_path / "a.safetensors", "r@1", "--store", disk, "-o", "json")
        assert (done.code, done.error["code"]) == (7, "store_full")
        assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_no_torch_is_needed_for_safetensors(store: Path, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
    script = (
        "import sys; sys.modules.update(torch=None, safetensors=None); from tests.support.command_line import invoke\n"
        f"a = invoke('import', {str(tmp_path / 'a.safetensors')!r}, 'r@1', '--store', {str(store)!r})\n"
        f"b = invoke('export', 'r@1', '--to', {str(tmp_path / 'b.safetensors')!r}, '--store', {str(store)!r})\n"
        f"c = invoke('import', {str(tmp_path / 'x.pt')!r}, 'r@2', '--store', {str(store)!r})\n"
        "print(a, b, c); sys.exit((a.code, b.code, c.code) != (0, 0, 2) or 'ckptd[torch]' not in c.stderr)"
    )
    (tmp_path / "x.pt").touch()
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment({"PYTHONPATH": str(root)}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_killed_import_leaves_no_checkpoint(store: Path, tmp_path: Path) -> None:
    layout = write_header(
        tmp_path / "a.safetensors", {"w": {"dtype": "U8", "shape": [1 << 30], "data_offsets": [0, 1 << 30]}}
    )
    with open(layout, "rb+") as file:
        file.truncate(layout.stat().st_size + (1 << 30))
    args = ["import", str(layout), "r@1", "--store", str(store)]
    process = fork(COMMAND_LINE, "ckptctl", args, stdout=1, stderr=2, environment=clean_environment())
    try:
        wait_until(lambda: any(store.rglob("shard-*")) or process.poll() is not None, "the start of the shard")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    run = Run(open_store(str(store)), "r")
    assert list_checkpoints(run) == []
    assert not any(info.key.endswith(".json") for info in run.store.list(run.keys.attempts))
    os.truncate(layout, 0)
