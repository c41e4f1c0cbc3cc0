"""Several hosts on one machine: namespaces of the kernel, joined by virtual cables and a switch.

    with Bed(["a", "b"]) as bed:
        bed["a"].run("ping", "-c1", "b")

Each host has a name, an address, processes, /tmp, /dev/shm, a disk (machine.DISK) and a boot of its own. It has no way
to this machine's network. All of them, with their switches and disks, are in one more host that nobody sees, the rack:
they end with it, and it ends with this process, also after SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tests.hosts.machine import CLOCK, CLOCK_VARIABLE, DISKS
from tests.support import forking
from tests.support.forking import TRAINER, Fork
from tests.support.waiting import DEADLINE_S

_BURST_BYTES = 256 << 10


@dataclass
class Machine:
    """A host that runs."""

    name: str
    address: str
    clock_s: float
    forks: forking.Host
    process: Fork
    """It ends when the host has."""
    first: int
    """The first process of the host: its id in the rack, and a pidfd."""
    descriptor: int

    def fork(self, module: str, arguments: Sequence[str], **options: Any) -> Fork:
        """As tests.support.forking.fork, on this host."""
        given: Mapping[str, str] = options.pop("environment", None) or os.environ
        own = {"HOME": "/tmp", "TMPDIR": "/tmp", "PATH": f"{os.path.dirname(sys.executable)}:{given['PATH']}"}
        if self.clock_s:
            own |= {"PYTHONPATH": f"{CLOCK}:{given.get('PYTHONPATH', '')}", CLOCK_VARIABLE: str(self.clock_s)}
        return self.forks.fork(module, arguments, environment={**given, **own}, **options)

    def start(self, *command: str, output: int = 2, environment: Mapping[str, str] | None = None) -> Fork:
        """Begin a program, one of this Python's environment or of the PATH. output: the file to which it writes."""
        return self._execute("run", *command, stdout=output, stderr=output, environment=environment)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """A program to its end; its output. AssertionError if it fails."""
        with tempfile.TemporaryFile("w+") as output:
            started = self.start(*command, output=output.fileno(), environment=environment)
            return _output(started, " ".join(command), output)

    def call(self, function: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
        """The value that a function ("module:name") returns on this host; it and the arguments pass as JSON."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            files = {"stdout": output.fileno(), "stderr": errors.fileno()}
            called = self._execute("call", function, json.dumps(arguments), environment=environment, **files)
            return json.loads(_output(called, function, output, errors).splitlines()[-1])

    def _execute(self, *words: str, environment: Mapping[str, str] | None, **files: int) -> Fork:
        return self.fork("tests.hosts.execute", words, environment={**os.environ, **(environment or {})}, **files)


class Bed:
    """Hosts by name, and what joins them. Its methods return when their effect is there."""

    def __init__(
        self,
        names: Sequence[str],
        mbit: int | None = None,
        latency_s: float = 0.0,
        clocks: Mapping[str, float] | None = None,
        imports: Sequence[str] = TRAINER,
        disk_bytes: int = 1 << 30,
    ) -> None:
        """mbit: the bandwidth of each host, in either direction. latency_s: of each frame to or from a host. clocks:
        seconds that the wall clock of a host is ahead. imports: the modules that forks on the hosts have from the
        start."""
        self._addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
        self._disk_bytes = disk_bytes
        self._mbit, self._latency_s, self._clocks = mbit, latency_s, dict(clocks or {})
        self._running: dict[str, Machine] = {}
        self._begun: list[Machine] = []
        self._bridges = 0
        self._rack = self._begin("rack", forking.host(tuple(imports)))
        try:
            self.part(())
            for name in names:
                self.start(name, empty=True)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Machine:
        return self._running[name]

    @property
    def names(self) -> set[str]:
        """The hosts that run."""
        return {*self._running}

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts."""
        for machine in (*self._begun, self._rack):
            os.close(machine.descriptor)
            machine.forks.connection.close()
        self._rack.process.wait(DEADLINE_S)

    def start(self, name: str, empty: bool = False) -> Machine:
        """A host that does not run begins, with the disk that it had or with an empty one, in the last bridge."""
        if empty:
            disk = f"{DISKS}/{name}"
            self._shell(
                f"mkdir -p {disk}; ! mountpoint -q {disk} || umount {disk}",
                f"mount -t tmpfs -o size={self._disk_bytes} none {disk}",
            )
        machine = self._running[name] = self._begin(name, self._rack.forks)
        self._begun.append(machine)
        self._shell(
            *self._cable(machine),
            f"ip link set dev {name} master br{self._bridges} up",
            *self._limit(name),
        )
        machine.run(
            *_shell(
                "ip link set dev lo up",
                f"ip address add {machine.address}/24 dev eth0",
                # The same in all lives: the others' tables of addresses would be wrong for a minute.
                f"ip link set dev eth0 address 02:00:00:00:00:{int(machine.address.rpartition('.')[2]):02x} up",
                *self._limit("eth0"),
            )
        )
        return machine

    def kill(self, name: str) -> None:
        """End all processes of a host at once, as a power failure does. Its disk stays."""
        machine = self._running.pop(name)
        signal.pidfd_send_signal(machine.descriptor, signal.SIGKILL)
        machine.process.wait(DEADLINE_S)
        self._shell(f"ip link delete dev {name} 2>/dev/null || true")  # the kernel does it some time later

    def limit(self, name: str, mbit: int) -> None:
        """From now on a host sends, and receives, no more than this."""
        rate = f"root tbf rate {mbit}mbit burst {_BURST_BYTES} latency 50ms"
        self._shell(f"tc qdisc replace dev {name} {rate}")
        self._running[name].run(*_shell(f"tc qdisc replace dev eth0 {rate}"))

    def part(self, *groups: Sequence[str]) -> None:
        """From now on hosts reach each other within a group only; those in no group reach nobody."""
        lost = [f"ip link set dev {name} nomaster" for name in self._running]
        self._shell(*lost)
        for group in groups:
            self._bridges += 1
            bridge = f"br{self._bridges}"
            self._shell(
                f"ip link add name {bridge} type bridge",
                f"ip link set dev {bridge} up",
                *(f"ip link set dev {name} master {bridge}" for name in group),
            )

    def join(self) -> None:
        """From now on all hosts reach each other again."""
        self.part(list(self._running))

    def _begin(self, name: str, forks: forking.Host) -> Machine:
        hosts = "".join(f"{address} {one}\n" for one, address in {"localhost": "127.0.0.1", **self._addresses}.items())
        clock_s = self._clocks.get(name, 0.0)
        options = {"name": name, "hosts": hosts, "hidden": [tempfile.gettempdir()], "clock_s": clock_s}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = forks.fork(
                "tests.hosts.machine", [json.dumps(options)], stdout=2, stderr=2, passed=[theirs.fileno()]
            )
        own = forking.Host(ours, process)
        first, [descriptor] = own.answer()
        return Machine(name, self._addresses.get(name, ""), clock_s, own, process, first, descriptor)

    def _cable(self, machine: Machine) -> list[str]:
        """From the switch to a host: two devices of the kernel, or with a latency two ends of a program."""
        if not self._latency_s:
            return [f"ip link add name {machine.name} type veth peer name eth0 netns {machine.first}"]
        reader, writer = os.pipe()
        words = [machine.name, str(machine.first), str(self._latency_s)]
        self._rack.fork("tests.hosts.latency", words, stdout=writer, stderr=2)
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        return []

    def _limit(self, device: str) -> list[str]:
        if self._mbit is None:
            return []
        return [f"tc qdisc add dev {device} root tbf rate {self._mbit}mbit burst {_BURST_BYTES} latency 50ms"]

    def _shell(self, *lines: str) -> None:
        self._rack.run(*_shell(*lines))


def _shell(*lines: str) -> tuple[str, ...]:
    return "sh", "-ec", "\n".join(lines)


def _output(started: Fork, what: str, output: IO[str], errors: IO[str] | None = None) -> str:
    """The output of a process that ends; AssertionError if it fails."""
    try:
        code = started.wait(DEADLINE_S)
    finally:
        started.kill()
        started.wait()
    for file in (output, errors or output):
        file.seek(0)
    found = output.read()
    assert code == 0, f"{what}: exit {code}\n{found}{errors.read() if errors else ''}"
    return found
