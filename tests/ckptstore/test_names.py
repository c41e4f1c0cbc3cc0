from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import names
from ckptstore.errors import InvalidName
from ckptstore.names import Attempt, Reference, RunKeys, derive_ulid, new_ulid

ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"


@pytest.mark.parametrize("run", ["a", "gpt-small", "2026.11.21_x", "A" * 128, "team/gpt", "sweep/lr=0.1,wd=0"])
def test_runs(run: str) -> None:
    assert names.check_run(run) == run


@pytest.mark.parametrize(
    "run",
    ["", "../x", "..", ".", ".hidden", "-x", "_x", "a//b", "a/", "a/.b", "a~b", "a\\b", "a b", "a..b", "a@b", "ü",
     "a\n", "a\0", "A" * 129, None, 3, b"run"],
)  # fmt: skip
def test_runs_that_are_refused(run: object) -> None:
    with pytest.raises(InvalidName) as caught:
        RunKeys(run)  # type: ignore[arg-type]
    assert caught.value.hint


@given(st.text(max_size=40) | st.from_regex(r"[a-z0-9./-]{1,20}"))
def test_no_key_leaves_its_run(text: str) -> None:
    attempts: list[Callable[[], str]] = [
        lambda: RunKeys(text).commits,
        lambda: RunKeys("gpt").outcome(Attempt.parse(text)),
        lambda: RunKeys("gpt").shard(Attempt(1, ULID), text),
        lambda: RunKeys("gpt").shard(Attempt(1, text), "shard-00000.ckpt"),
    ]
    for key_of in attempts:
        try:
            key = key_of()
        except InvalidName:
            continue
        parts = key.rstrip("/").split("/")
        assert 2 <= len(parts) <= 4
        assert all(part.strip(".") for part in parts)


@pytest.mark.parametrize("what", ["step", "generation"])
@pytest.mark.parametrize("number", [-1, 10**12, True, 1.0, "1", None])
def test_numbers_that_are_refused(what: str, number: object) -> None:
    with pytest.raises(InvalidName, match=what):
        Attempt(**{"step": 1, "ulid": ULID, what: number})  # type: ignore[arg-type]
    with pytest.raises(InvalidName, match="generation"):
        Attempt(1, ULID, generation=10**6)


def test_generations_and_receipts_are_recognised() -> None:
    assert names.generation_number(RunKeys("gpt").generation(12)) == 12
    for key in ("gpt/generations/000000.json", "gpt/generations/1.json", "gpt/commits/000001.json"):
        assert names.generation_number(key) is None
    attempt = Attempt(1, ULID)
    assert names.receipt_rank(RunKeys("gpt").receipt(attempt, 12)) == 12
    for key in (RunKeys("gpt").shard(attempt, "shard-00012.ckpt"), RunKeys("gpt").manifest(attempt), "shard-1.json"):
        assert names.receipt_rank(key) is None


@given(st.integers(0, names.MAX_STEP), st.floats(0, 2**37), st.integers(0, names.MAX_GENERATION))
def test_attempts_round_trip_and_sort_by_generation_then_step(step: int, now: float, generation: int) -> None:
    attempt = Attempt(step, new_ulid(now), generation=generation)
    assert Attempt.parse(str(attempt)) == attempt
    later = Attempt(min(step + 1, names.MAX_STEP), new_ulid(0), generation=generation)
    assert (str(attempt) < str(later)) == (attempt < later)
    if generation < names.MAX_GENERATION:
        assert attempt < Attempt(0, new_ulid(0), generation=generation + 1)
    assert Reference.parse(names.checkpoint_id("gpt", attempt)) == Reference("gpt", step, attempt.ulid)


@pytest.mark.parametrize(
    "text",
    ["", "5", f"5-{ULID}", f"000000000005{ULID}", f"-00000000005-{ULID}", f"000000000005-{ULID}x",
     f"٠00000000005-{ULID}", f"000000-000000000005-{ULID}", f"1-000000000005-{ULID}", f"00000a-000000000005-{ULID}",
     f"000000000005-{ULID.lower()}", f"000000000005-{ULID[:-1]}U"],
)  # fmt: skip
def test_attempts_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        Attempt.parse(text)


def test_references() -> None:
    assert Reference.parse("gpt@latest") == Reference("gpt", None)
    for text in ("gpt@latest", "gpt@5", names.checkpoint_id("gpt", Attempt(5, new_ulid(0)))):
        assert str(Reference.parse(text)) == text
    assert Reference.parse("gpt.2@17") == Reference("gpt.2", 17)
    for text in ("gpt", "gpt@", "@1", "gpt@-1", f"gpt@latest.{ULID}", "../x@1", "gpt@1.short", "gpt@1@2", "a//b@1"):
        with pytest.raises(InvalidName):
            Reference.parse(text)


def test_all_ranks_derive_the_same_ulid() -> None:
    session = new_ulid(1_700_000_000.0)
    one = derive_ulid(session, 5, 0)
    assert one == derive_ulid(session, 5, 0)
    assert one[:10] == session[:10], "keeps the time"
    assert len({derive_ulid(session, step, count) for step in range(20) for count in range(20)}) == 400
