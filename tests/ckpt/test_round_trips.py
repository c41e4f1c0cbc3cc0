"""How many requests of a save and of a restore wait for one another: over a network each of them takes a round trip."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch

from ckpt import Checkpointer
from ckptstore.stores import s3
from tests.ckptstore.proxies import Answered, LossyProxy, lossy_proxy
from tests.support.seaweed import BUCKET, S3Service

PART_BYTES = 5 << 20
ROUND_TRIP_S = 0.05
TRIES = 6
"""On a busy machine, threads that send requests together may be late: only the best of some tries counts."""

SAVE = [
    "POST shard ?uploads", "PUT shard", "POST shard ?uploadId", "PUT receipt", "PUT manifest", "PUT commits",
    "GET dead",
]  # fmt: skip
RESTORE = ["GET commits", "GET dead", "PUT leases", "GET tombstones", "GET dead", "GET shard"]


@pytest.fixture
def proxy(s3_service: S3Service) -> Iterator[LossyProxy]:
    with lossy_proxy(s3_service.endpoint) as found:
        yield found


@pytest.fixture
def checkpointer(s3_service: S3Service, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    monkeypatch.setattr(s3, "PART_BYTES", PART_BYTES)
    options = {**s3_service.options, "endpoint_url": proxy.url}
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with Checkpointer(url, run="gpt", options=options, writer="thread", compress="off", slots=1) as found:
        yield found


@pytest.fixture
def model() -> torch.nn.Module:
    """Of two parts."""
    return torch.nn.Linear(1024, 1600)


def kind(request: str) -> str:
    """PUT commits, GET shard, ..."""
    verb, _, where = request.partition(" ")
    path, _, query = where.partition("?")
    prefix = re.search(r"prefix=([^&]*)", query)
    names = (prefix[1].replace("%2F", "/") if prefix else path.removeprefix(f"/{BUCKET}/")).split("/")
    at = names[names.index("gpt") + 1 :]
    parts = {"ckpt": "shard", "json": "receipt", "json.zst": "manifest"}
    name = parts[at[2].partition(".")[2]] if at[2:] and at[2] else at[0]
    return f"{verb} {name}" + (f" ?{query.partition('=')[0]}" if verb == "POST" else "")


def in_a_row(answered: list[Answered]) -> list[str]:
    """The longest sequence of requests each of which began after the reply to the one before."""
    found: list[Answered] = []
    for one in sorted(answered, key=lambda one: one.replied_at):
        if not found or one.received_at >= found[-1].replied_at:
            found.append(one)
    return [kind(one.request) for one in found]


def shortest(proxy: LossyProxy, act: Callable[[], object], wanted: int) -> tuple[list[str], list[str]]:
    """The requests in a row of one act, and all of its requests, but for what is deleted after it."""
    best: list[str] | None = None
    for _ in range(TRIES):
        proxy.arm(None)
        act()
        answered = [one for one in proxy.answered if not one.request.startswith("DELETE")]
        row = in_a_row(answered)
        if best is None or len(row) < len(best):
            best, everything = row, sorted(kind(one.request) for one in answered)
        if len(best) <= wanted:
            break
    assert best is not None
    return best, everything


def test_a_save(proxy: LossyProxy, checkpointer: Checkpointer, model: torch.nn.Module) -> None:
    def save() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        checkpointer.save(model, None, step=next(steps))

    steps = iter(range(1, 100))
    save()  # begins a generation, and finds out what the store guarantees
    proxy.round_trip_s = ROUND_TRIP_S
    row, everything = shortest(proxy, save, len(SAVE))
    assert len(row) <= len(SAVE), row
    beside = ["PUT shard", "HEAD generations"]
    assert everything == sorted(SAVE + beside)


def test_a_restore(proxy: LossyProxy, checkpointer: Checkpointer, model: torch.nn.Module) -> None:
    checkpointer.save(model, None, step=1)
    proxy.round_trip_s = ROUND_TRIP_S
    row, everything = shortest(proxy, lambda: checkpointer.restore(model), len(RESTORE))
    assert len(row) <= len(RESTORE), row
    beside = ["GET attempts", "GET tombstones", "GET commits", "GET quarantine", "GET manifest", "GET receipt"]
    assert [one for one in everything if one != "GET shard"] == sorted([*RESTORE[:-1], *beside])
