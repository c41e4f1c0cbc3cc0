"""The hosts themselves: what they share, how they end, and what stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hosts.bed import Bed
from tests.hosts.machine import DISK, refusal
from tests.support.forking import ROOT
from tests.support.waiting import Lines, wait_until

IMPORTS = ("tests.hosts.probes",)
PROBES = "tests.hosts.probes"
_TIME = "import time; print(time.time())"


@pytest.fixture(scope="module")
def bed(namespaces: None) -> Iterator[Bed]:
    with Bed(["a", "b", "c"], clocks={"b": 600.0}, imports=IMPORTS) as bed:
        yield bed


def test_a_host_has_a_name_a_boot_a_clock_and_folders_of_its_own(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "ours").touch()
    folders = (DISK, "/tmp", "/dev/shm", tempfile.gettempdir())
    for name in "ab":
        assert [bed[name].run("find", folder, "-type", "f") for folder in folders] == [""] * 4
        bed[name].run("touch", *(f"{folder}/{name}" for folder in folders))
    assert [bed[name].run("hostname") for name in "ab"] == ["a\n", "b\n"]
    boot = "/proc/sys/kernel/random/boot_id"
    assert len({Path(boot).read_text(), *(bed[name].run("cat", boot) for name in "abc")}) == 4
    for clock in (lambda host: host.call("time:time"), lambda host: float(host.run("python", "-c", _TIME))):
        assert 500 < clock(bed["b"]) - clock(bed["a"]) < 700


def test_a_host_reaches_the_others_by_name_and_nothing_else(bed: Bed) -> None:
    assert bed["a"].call(f"{PROBES}:reaches", "b")
    devices = bed["a"].run("ip", "-o", "link").splitlines()
    assert [device.split()[1].partition("@")[0].rstrip(":") for device in devices] == ["lo", "eth0"]
    assert [route.split()[0] for route in bed["a"].run("ip", "route").splitlines()] == ["10.0.0.0/24"]
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        with pytest.raises(AssertionError, match="ConnectionRefusedError"):
            bed["a"].call(f"{PROBES}:send", "127.0.0.1", port, 1)


def test_a_host_that_was_killed_comes_back_with_its_disk_or_is_replaced(bed: Bed) -> None:
    sleeping = bed["c"].start("sleep", "1000")
    bed["c"].run("touch", f"{DISK}/kept", "/tmp/lost")
    bed.kill("c")
    assert sleeping.wait() == -signal.SIGKILL
    assert not bed["a"].call(f"{PROBES}:reaches", "c", 0.5)
    bed.start("c")
    assert bed["c"].run("ls", DISK, "/tmp").split() == [f"{DISK}:", "kept", "/tmp:"]
    assert bed["a"].call(f"{PROBES}:reaches", "c")
    bed.kill("c")
    bed.start("c", empty=True)
    assert bed["c"].run("ls", DISK) == ""


def test_a_network_is_parted_and_joined_again(bed: Bed) -> None:
    bed.part(["a", "b"])
    assert bed["a"].call(f"{PROBES}:reaches", "b")
    assert not bed["a"].call(f"{PROBES}:reaches", "c", 0.5)
    bed.part(["a"], ["b", "c"])
    assert bed["b"].call(f"{PROBES}:reaches", "c")
    assert not bed["b"].call(f"{PROBES}:reaches", "a", 0.5)
    bed.join()
    assert bed["a"].call(f"{PROBES}:reaches", "b")
    assert bed["c"].call(f"{PROBES}:reaches", "a")


def test_bytes_and_answers_take_as_long_as_the_network_was_made(namespaces: None) -> None:
    """At least: other work on this machine makes it longer."""
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("a slow cable needs /dev/net/tun")
    with Bed(["a", "b"], mbit=8, latency_s=0.02, imports=IMPORTS) as bed:
        reader, writer = os.pipe()
        bed["b"].fork(PROBES, [bed["b"].address], stdout=writer, stderr=2)
        os.close(writer)
        with open(reader) as said:
            port = int(said.readline())
        num_bytes = 1 << 20
        took_s = bed["a"].call(f"{PROBES}:send", "b", port, num_bytes)
    assert took_s > (num_bytes - (256 << 10)) / 1e6 + 2 * 0.02


_PROGRAM = """
import time
from tests.hosts.bed import Bed
bed = Bed(["a", "b"], imports=("tests.hosts.probes",))
bed["a"].start("setsid", "sleep", "1000")
print("ready", flush=True)
time.sleep(1000)
"""


def networks(mark: str) -> set[str]:
    """The network namespaces of processes whose environment has this text."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if mark.encode() in (process / "environ").read_bytes():
                found.add(os.readlink(process / "ns/net"))
    return found


def test_nothing_is_left_of_the_hosts_of_a_process_that_was_killed(namespaces: None, tmp_path: Path) -> None:
    environment = {**os.environ, "MARK": str(tmp_path)}
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as killed:
        assert Lines(killed.stdout).next() == "ready\n"
        assert len(networks(str(tmp_path))) == 4, "two hosts, the rack, and this machine"
        killed.kill()
    wait_until(lambda: not networks(str(tmp_path)), "the end of the hosts")


def test_without_root_the_tests_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert "root" in (refusal() or "")
