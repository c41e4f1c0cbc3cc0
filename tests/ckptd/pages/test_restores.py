from __future__ import annotations

from typing import Any

from ckptapi.bodies import CheckpointBody, Phase, RankBody, RestoreBody, RestoreState
from ckptd.pages.restores import session_view
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt

_ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"


def _session(world_size: int, ranks: list[RankBody], **of: Any) -> RestoreBody:
    checkpoint = Checkpoint("gpt", Attempt(1, _ULID), State.COMMITTED)
    return RestoreBody(
        id=_ULID, run="gpt", key="k", checkpoint=CheckpointBody.of(checkpoint), world_size=world_size, ttl_s=60,
        state=RestoreState.RESTORING, created_at=10, expires_at=70.0, ended_at=None, num_joined=len(ranks),
        num_restored=0, done_bytes=0, total_bytes=0, problem="", ranks=ranks, **of,
    )  # fmt: skip


def test_a_session_shows_first_who_failed_then_who_is_behind() -> None:
    ranks = [
        RankBody(0, Phase.RESTORED, 10, 10, 19), RankBody(1, Phase.FETCHING, 9, 10, 19),
        RankBody(2, Phase.FETCHING, 5, 10, 19), RankBody(3, Phase.FAILED, 8, 10, 19, "no"),
    ]  # fmt: skip
    view = session_view(_session(5, ranks, progress=0.5, stragglers=[1, 4]))
    assert [row.rank for row in view.rows] == [3, 1, 2, 0]
    assert [cell.kind for cell in view.cells] == ["restored", "fetching", "fetching", "failed", "absent"]
    assert view.phases == (("absent", 1), ("failed", 1), ("fetching", 2), ("restored", 1))


def test_cells_of_thousands_of_ranks_are_of_the_kind_of_the_least_advanced() -> None:
    ranks = [RankBody(rank, Phase.RESTORED, 1, 1, 19) for rank in range(4096) if rank != 70]
    ranks.append(RankBody(70, Phase.PLANNING, 0, 1, 19))
    view = session_view(_session(4096, sorted(ranks, key=lambda p: p.rank)))
    assert (view.joined_cells, len(view.cells)) == (7, 586)
    assert [i for i, cell in enumerate(view.cells) if cell.kind != "restored"] == [10]
    assert (view.cells[10].kind, len(view.rows)) == ("planning", 64)
