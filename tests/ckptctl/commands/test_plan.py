from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptplan.plan import plan as plan_by_keywords
from tests.support.command_line import Terminal, invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until


def planned(*args: object) -> Any:
    done = invoke("plan", *args, "-o", "json")
    assert (done.code, done.stderr) == (0, "")
    return done.json


def test_options_are_the_inputs_of_python() -> None:
    options = (
        "--parameters", "70B", "--dp", 8, "--tp", 8, "--sharding", "fsdp", "--bandwidth", "60GB", "--window", "1m",
        "--failures", "llama3", "--restart", "5m", "--stall", "0.2s", "--steps", 1000, "--step", "2.5s",
        "--no-compress",
    )  # fmt: skip
    found = plan_by_keywords(
        parameters=70e9, dp=8, tp=8, sharding="fsdp", bandwidth=60e9, window_s=60, failures="llama3", restart_s=300,
        stall_s=0.2, steps=1000, step_s=2.5, compress=False,
    )  # fmt: skip
    body = planned(*options)
    assert body["interval"]["ettr"] == found.interval.ettr
    assert body["size"]["stored_bytes"] == found.size.stored_bytes == 980_000_000_000
    assert body["termination_grace_period_s"] == found.termination_grace_period_s


@pytest.mark.parametrize(("name", "size"), [("8b", "104.70"), ("1t", "15,427.01")])
def test_every_term_is_printed(name: str, size: str) -> None:
    lines = invoke("plan", "--model", f"mlperf-{name}").stdout.splitlines()
    table = [line.split()[:3] for line in lines[3:9]]
    assert table == [
        ["weights", "bfloat16", "2"], ["master", "float32", "4"], ["momentum", "float32", "4"],
        ["variance", "float32", "4"], ["grads", "not", "saved"], ["total", "14", size],
    ]  # fmt: skip


def test_rules_and_price() -> None:
    body = planned("--model", "mlperf-8b", "--steps", 1000, "--step", "6s", "--interval", "60s", "--keep", 5,
                   "--keep-every", 100, "--price", "0.02")  # fmt: skip
    assert body["retained"]["num_kept"] == 14
    assert body["retained"]["price_per_month"] == pytest.approx(14 * body["size"]["stored_bytes"] / 1e9 * 0.02)


def test_a_configuration_file_and_safetensors_files(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = planned("--config", path)["model"]
    assert model == {"parameters": 124_318_464, "expert_parameters": 0, "source": str(path)}
    save_file({"a": np.zeros((3, 5), np.float16)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(10, np.float16), "c": np.zeros(2, np.float32)}, tmp_path / "2.safetensors")
    body = planned("--safetensors", tmp_path)
    assert (body["model"]["parameters"], body["terms"][0]["dtype"]) == (27, "float16")
    assert planned("--safetensors", tmp_path / "1.safetensors")["size"]["raw_bytes"] == 14 * 15


def test_a_checkpoint_in_a_store_and_in_a_daemon(folder: Path) -> None:
    with running_daemon(folder.as_uri()) as daemon:
        for name, shown in (("gpt", "gpt@latest"), ("gpt@20", "gpt@20"), ("gpt@latest", "gpt@latest")):
            body = planned(name, "--store", folder)
            checkpoint = invoke("show", shown, "--store", folder, "-o", "json").json["checkpoint"]
            assert body["size"]["raw_bytes"] == checkpoint["raw_bytes"]
            assert body["size"]["compressed_bytes"] == pytest.approx(checkpoint["stored_bytes"], abs=1)
            assert (body["model"]["source"], planned(name, "--url", daemon.url)) == (checkpoint["id"], body)


def test_a_run_is_measured(folder: Path) -> None:
    done = invoke("plan", "--from", "gpt", "--store", folder, "--mtbf", "8h", "-o", "json")
    assert re.search(r"time until durable: \S+ \(median\), \S+ \(slowest\)", done.stderr)
    assert done.code == 0
    assert "no measurement of: stall, slowdown" in done.stderr
    assert done.json["interval"]["durable_source"] == "measured"
    given = invoke("plan", "--from", "gpt", "--store", folder, "--durable", "3s", "-o", "json").json["interval"]
    assert (given["durable_s"], given["durable_source"]) == (3.0, "given")


def test_a_store_is_measured_and_left_clean(tmp_path: Path) -> None:
    done = succeed("plan", "--parameters", "1e9", "--measure", tmp_path, "--measure-size", "32MiB", "-o", "json")
    assert "one rank writes" in done.stderr
    assert done.json["interval"]["durable_s"] > 0
    assert done.json["restore"]["seconds_shared"] > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_ctrl_c_leaves_a_measured_store_clean(tmp_path: Path) -> None:
    arguments = ("plan", "--parameters", "1e9", "--measure", tmp_path, "--measure-size", "2GB")

    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    with Terminal(*arguments) as terminal:
        wait_until(lambda: bool(files()), "the first object")
        terminal.interrupt()
        assert terminal.finish() == 130
    assert files() == []


def test_the_chart(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    options = "--model mlperf-405b --nodes 2048 --tp 8 --pp 16 --sharding fsdp --stall 20s --restart 5m --interval 30m"
    assert invoke("plan", *options.split(), "--failures", "rsc-1", "--plot", path).code == 0
    root = ElementTree.fromstring(path.read_text())
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "Effective training time 80.62% with a save every 30m 00s"
    assert any(text.startswith("Daly, Young: ") for text in texts)
    assert "interval: 30m 00s" in texts
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    for element in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(element.attrib["cx"]) < width
        assert 0 < float(element.attrib["cy"]) < height
    assert "prefers-color-scheme: dark" in path.read_text()


def test_a_chart_that_cannot_be_drawn_or_written(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "plan.svg"
    without = invoke("plan", "--parameters", "1e9", "--plot", path)
    assert (without.code, "--mtbf" in without.stderr) == (2, True)
    unwritable = invoke("plan", "--parameters", "1e9", "--mtbf", "8h", "--plot", path, "-o", "json")
    assert (unwritable.code, unwritable.error["code"], unwritable.stdout) == (1, "not_written", "")
