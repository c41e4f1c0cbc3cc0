from ckptstore.commits.catalog import latest
from ckptstore.retention.scrubbing import due_newest, scrub
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint

_DAY_S = 24 * 3600.0


def _due(run: Run) -> int | None:
    found = due_newest(run, _DAY_S, 30 * _DAY_S)
    return found.step if found is not None else None


def test_the_newest_checkpoint_of_a_run_is_due_once_a_day_while_it_saves(store: Store) -> None:
    now = [1_700_000_000.0]
    run = Run(store, "gpt", clock=lambda: now[0])

    def scrub_newest() -> None:
        assert all(found.ok for found in scrub(store, [latest(run)], "me", run.clock))

    assert _due(run) is None, "there is none"
    write_checkpoint(store, step=1, arrays=sample_arrays(1), clock=run.clock)
    assert _due(run) == 1
    scrub_newest()
    now[0] = next(info.modified_at for info in store.list(run.keys.verified))  # by the store's clock
    assert _due(run) is None
    now[0] += 2 * _DAY_S
    assert _due(run) is None, "the same one only after 30 days"
    write_checkpoint(store, step=2, clock=run.clock)
    assert _due(run) == 2
    now[0] -= 1.5 * _DAY_S
    assert _due(run) is None, "not before a day has passed"
    now[0] -= 365 * _DAY_S
    assert _due(run) == 2, "the clock of the last one was a year ahead"


def test_a_damaged_newest_checkpoint_makes_the_one_before_it_due(store: Store) -> None:
    run = Run(store, "gpt")
    write_checkpoint(store, step=1)
    damaged = write_checkpoint(store, step=2)
    store.delete_many([run.keys.shard(damaged.attempt, "shard-00000.ckpt")])
    (found,) = scrub(store, [damaged], "me", run.clock, ranks=[8])
    assert not found.ok
    assert _due(run) == 1
