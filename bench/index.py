"""The daemon's index with 100,000 checkpoints in 1,000 runs: response times, reindexing and memory.

The outcomes are synthetic and written directly into a folder. Requests are sent to the services in a separate
process, one after the other; then a real daemon answers GET /checkpoints/latest over eight connections that are kept
open.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.report import Goal, Report
from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing, PageKey
from ckptd.metrics import Metrics
from ckptd.services import Catalog, Freshness, StoreSync
from ckptstore.clock import system_clock
from ckptstore.format.documents import FORMAT, Committed, Outcome, Summary
from ckptstore.format.parsing import seal
from ckptstore.names import Attempt, Reference, RunKeys, new_ulid
from ckptstore.stores import open_store

ANSWER_MS = 10.0
LATEST_PER_S = 1000.0
REINDEX_PER_S = 2000.0
MEMORY_BYTES = 300e6
RUNS = 1000
PER_RUN = 100
QUESTIONS = 2000
CONNECTIONS = 8
PAGE = 100


def measure(quick: bool) -> Report:
    """Write a store, then measure in fresh processes."""
    runs = RUNS // 20 if quick else RUNS
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder, "store"), runs)
        asked = in_fresh_process(folder, runs)
        served = over_http(folder, runs, 2.0 if quick else 10.0)
    found = asked | served
    answers = {name: found[f"{name}_p99_ms"] for name in ("latest", "latest_of_runs", "page", "show")}
    peak = max(found["services_peak_bytes"], found["daemon_peak_bytes"])
    shares = {
        "answers": max(answers.values()) / ANSWER_MS,
        "latest": LATEST_PER_S / found["latest_per_s"],
        "reindex": REINDEX_PER_S / found["reindex_per_s"],
        "memory": peak / MEMORY_BYTES,
    }
    return Report(
        bench="index",
        what=f"{runs * PER_RUN} checkpoints in {runs} runs, SQLite",
        columns=("", "", "goal"),
        rows=[
            *(
                (f"{name.replace('_', ' ')}, p99", f"{ms:.2f} ms", f"{ANSWER_MS:.0f} ms")
                for name, ms in answers.items()
            ),
            ("latest over HTTP", f"{found['latest_per_s']:.0f} /s", f"{LATEST_PER_S:.0f} /s"),
            ("latest over HTTP, p99", f"{found['http_p99_ms']:.1f} ms", ""),
            ("reindex", f"{found['reindex_per_s']:.0f} /s", f"{REINDEX_PER_S:.0f} /s"),
            ("a poll that finds nothing new", f"{found['poll_s']:.2f} s", ""),
            ("peak memory, services and daemon", f"{peak / 1e6:.0f} MB", f"{MEMORY_BYTES / 1e6:.0f} MB"),
        ],
        goals=[Goal(name, "limit", share, 1.0, "at most") for name, share in shares.items()],
        facts=found,
    )


def write_store(root: Path, runs: int) -> None:
    """Write outcomes only: an index reads nothing else."""
    now = system_clock()
    for number in range(runs):
        run = run_name(number)
        (root / run / "commits").mkdir(parents=True)
        for step in range(PER_RUN):
            outcome = made_up(run, Attempt(step * 1000, new_ulid(now)), now - runs + number + step / PER_RUN)
            (root / RunKeys(run).outcome(Attempt.parse(outcome.attempt))).write_bytes(seal(outcome))


def run_name(number: int) -> str:
    """Name of one run."""
    return f"run-{number:04d}"


def made_up(run: str, attempt: Attempt, at: float) -> Outcome:
    """A committed outcome."""
    summary = Summary(
        world_size=64, created_at=at - 30, raw_bytes=10**12, stored_bytes=8 * 10**11, num_entries=300, num_shards=64,
        metrics={"val_loss": 1 / (1 + attempt.step)},
    )  # fmt: skip
    return Outcome(
        format=FORMAT, kind="outcome", run=run, step=attempt.step, attempt=str(attempt), nonce=attempt.ulid, by="bench",
        at=at, committed=Committed(digest=random.randbytes(16).hex(), bytes=10**6, summary=summary),
    )  # fmt: skip


def in_fresh_process(folder: str, runs: int) -> dict[str, float]:
    """The result of `ask`."""
    command = [sys.executable, "-m", "bench.index", folder, str(runs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def ask(folder: str, runs: int) -> dict[str, float]:
    """Index the store, then send requests to the services."""
    store = open_store(f"{folder}/store")
    database = Database(f"sqlite:///{folder}/index.db", 20)
    index = Index(database)
    index.adopt(store.url, system_clock())
    freshness = Freshness(system_clock, 3600)
    store_sync = StoreSync(store, index, freshness, Metrics(), system_clock)
    catalog = Catalog(index, Listing(database), freshness, store.url)
    reindex_s = seconds(store_sync.reindex)
    store_sync.run_once()
    found = {"reindex_per_s": runs * PER_RUN / reindex_s, "poll_s": seconds(store_sync.run_once)}
    draw = random.Random(0)

    def run() -> str:
        return run_name(draw.randrange(runs))

    def place() -> PageKey:
        return (run(), 0, draw.randrange(PER_RUN) * 1000, system_clock(), "Z" * 26)

    questions: dict[str, Callable[[], object]] = {
        "latest": lambda: catalog.latest(run()),
        "latest_of_runs": lambda: index.latest_of_runs(21),
        "page": lambda: catalog.page(Filter(), Sort.RUN, place(), PAGE),
        "show": lambda: catalog.find(Reference(run(), draw.randrange(PER_RUN) * 1000)),
    }
    for name, question in questions.items():
        found[f"{name}_p99_ms"] = 1e3 * p99([seconds(question) for _ in range(QUESTIONS)])
    database.close()
    return found | {"services_peak_bytes": peak_bytes("self")}


def over_http(folder: str, runs: int, during_s: float) -> dict[str, float]:
    """Responses per second of a daemon, and its memory."""
    paths = [f"/checkpoints/latest?run={run_name(number)}" for number in range(runs)]
    with running_daemon(folder) as (process, host, port):
        taken = asyncio.run(load(host, port, paths, during_s))
        peak = peak_bytes(str(process.pid))
    return {"latest_per_s": len(taken) / during_s, "http_p99_ms": 1e3 * p99(taken), "daemon_peak_bytes": peak}


async def load(host: str, port: int, paths: list[str], during_s: float) -> list[float]:
    """Send requests in a loop; returns the seconds of each response."""
    end = time.perf_counter() + during_s
    taken: list[float] = []

    async def ask_again(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        draw = random.Random(number)
        while (began := time.perf_counter()) < end:
            writer.write(f"GET {draw.choice(paths)} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            taken.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(ask_again(number) for number in range(CONNECTIONS)))
    return taken


@contextmanager
def running_daemon(folder: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A daemon on the store and the index in `folder`: process, host, port."""
    arguments = ["--store", f"{folder}/store", "--db", f"sqlite:///{folder}/index.db", "--cache-bytes", "0"]
    command = [sys.executable, "-m", "ckptd", "serve", *arguments, "--port", "0", "--auth", "off"]
    with (
        Path(folder, "log").open("w+") as log,
        subprocess.Popen(command, stderr=log, text=True) as process,
    ):
        try:
            while "listening on" not in (said := Path(folder, "log").read_text()):
                assert process.poll() is None, said
                time.sleep(0.05)
            url = next(line for line in said.splitlines() if "listening on" in line).rpartition(" ")[2]
            while httpx.get(f"{url}/readyz").status_code != 200:
                time.sleep(0.05)
            host, port = url.removeprefix("http://").split(":")
            yield process, host, int(port)
        finally:
            process.terminate()


def seconds(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_bytes(process: str) -> float:
    """Most resident memory; getrusage would count the parent's memory from before the program was loaded."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def p99(taken: list[float]) -> float:
    """The 99th percentile."""
    return sorted(taken)[int(len(taken) * 0.99)]


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], int(sys.argv[2]))))
