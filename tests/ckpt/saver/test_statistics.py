from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.saver import statistics as module
from ckpt.saver.pipeline import SavePipeline
from ckpt.saver.statistics import chunk_extremes, chunk_table
from ckptstore.analysis.statistics import CheckpointStatistics, read_statistics
from ckptstore.codecs.chunk_codecs import encode, fast, smallest
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.commits.catalog import latest, list_checkpoints
from ckptstore.errors import CorruptObject, InvalidRequest
from ckptstore.format.statistics import Table, merge
from ckptstore.names import RunKeys, shard_name
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.tiers.copying import copy_checkpoint
from tests.ckpt.saver.attempts import new_attempt, new_setup
from tests.ckpt.saver.test_pipeline import COUNT, RAW, job
from tests.ckptstore.codecs.test_dtypes import COMPONENTS
from tests.support.checkpoints import flipped

Words = npt.NDArray[Any]


def model(seed: int = 0, width: int = 96) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.Linear(width, 600)).to(torch.float32)


def statistics(store: Path | Store) -> CheckpointStatistics:
    opened = open_store(str(store)) if isinstance(store, Path) else store
    return read_statistics(StoreSource(opened), latest(Run(opened, "r")))


def check(found: CheckpointStatistics, state: dict[str, torch.Tensor]) -> None:
    assert not found.missing
    for name, tensor in state.items():
        row, numbers = found.tensors[name], tensor.double()
        assert (row.elements, row.shape) == (tensor.numel(), list(tensor.shape))
        finite = numbers[numbers.isfinite()]
        assert (row.minimum, row.maximum) == (finite.min().item(), finite.max().item())
        assert (row.nan, row.inf) == (numbers.isnan().sum().item(), numbers.isinf().sum().item())


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"model/{name}": value for name, value in module.state_dict().items()}


@pytest.mark.parametrize("knobs", [{}, {"max_references": 0}, {"compress": "off"}, {"compress": "max"}])
def test_statistics_of_a_training_state(tmp_path: Path, knobs: dict[str, Any]) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with Checkpointer(str(tmp_path), run="r", writer="thread", **knobs) as checkpointer:
        for step in (1, 2, 3):
            net(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            if step == 3:
                net.state_dict()["0.weight"][5, 7] = torch.nan
                net.state_dict()["2.bias"][599] = torch.inf
            checkpointer.save(net, optimizer, step=step)
            found = statistics(tmp_path)
            check(found, named(net))
    moments = [row for name, row in found.tensors.items() if name.startswith("optim/") and "exp_avg_sq" in name]
    assert len(moments) == 6
    assert all(row.minimum is not None and row.minimum >= 0 for row in moments)
    assert not found.tensors["model/0.weight"].is_finite
    assert not [key for key in files(tmp_path) if "statistics" in key], "they are in the shard"


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_statistics_of_a_rank_that_stores_no_chunk_are_an_object_of_their_own(tmp_path: Path) -> None:
    net = model()
    with Checkpointer(str(tmp_path / "one"), run="r", writer="thread") as checkpointer:
        checkpointer.save(net, None, step=1)
        checkpointer.save(net, None, step=2)
    one, two = StoreSource(open_store(str(tmp_path / "one"))), open_store(str(tmp_path / "two"))
    [key] = [key for key in files(tmp_path) if "statistics" in key]
    assert key.endswith("/shard-00000.statistics.json")
    check(read_statistics(one, one.latest("r")), named(net))
    copied = copy_checkpoint(one, one.latest("r"), Run(two, "r"), lambda _: None).checkpoint
    check(read_statistics(StoreSource(two), copied), named(net))
    assert [key for key in files(tmp_path) if "statistics" in key] == [key], "the copy has the chunks, and all in one"
    delete_checkpoint(Run(one.store, "r"), one.latest("r").attempt, "test", force=True)
    assert key not in files(tmp_path), "they are deleted with their checkpoint"


def test_statistics_can_be_switched_off(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="r", writer="thread", statistics=False) as checkpointer:
        checkpointer.save(model(), None, step=1)
    with pytest.raises(InvalidRequest, match="saved without statistics"):
        statistics(tmp_path)


def test_unchanged_chunks_keep_their_statistics_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[int] = []
    taken = chunk_table

    def counting(dtype: str, raw: memoryview, *rest: Any) -> Any:
        sampled.append(len(raw))
        return taken(dtype, raw, *rest)

    monkeypatch.setattr(module, "chunk_table", counting)
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    state_bytes = 6 * 512 * 512 * 4
    for process in range(2):
        with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
            if process:
                checkpointer.restore(net)
            for step in (1, 2, 3):
                net.state_dict()["0.weight"][0, 0] += 0.01
                sampled.clear()
                checkpointer.save(net, None, step=10 * process + step)
                # The first save of a process looks at everything; later ones only at what they encode.
                looked_at = sum(sampled)
                assert looked_at == state_bytes if step == 1 else looked_at < state_bytes / 4
                check(statistics(tmp_path), named(net))
    assert latest(Run(open_store(str(tmp_path)), "r")).referenced_bytes > 0


def test_casts_that_are_not_stored_have_statistics(tmp_path: Path) -> None:
    net = nn.Linear(512, 160).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            master = parameter.detach().float() + 1e-6
            optimizer.state[parameter]["master"] = master
            parameter.data.copy_(master)
    with Checkpointer(str(tmp_path), run="r", writer="thread", dedup_casts=True) as checkpointer:
        checkpointer.save(net, optimizer, step=1)
    source = StoreSource(open_store(str(tmp_path)))
    assert len(read_manifest(source, source.latest("r")).content.slices.derived_rows)
    check(statistics(tmp_path), named(net))


def save(store: Store, *steps: int) -> None:
    pipeline = SavePipeline(store, new_setup(store.url, compress="fast"), lambda _: None)
    for step in steps or (1,):
        pipeline.submit(job(new_attempt(step)), RAW)
    pipeline.close()


def test_a_save_survives_bad_statistics(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("memory://survey-error")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(module, "chunk_table", broken)
    save(store)
    assert latest(Run(store, "r")).raw_bytes == len(RAW)
    assert "could not be taken" in caplog.text
    with pytest.raises(InvalidRequest, match="saved without statistics"):
        statistics(store)


def test_a_save_survives_a_store_that_takes_no_statistics(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Refusing(type(open_store(str(tmp_path)))):  # type: ignore[misc]
        def put(self, key: str, data: bytes) -> None:
            if "statistics" in key:
                raise CorruptObject("injected")
            super().put(key, data)

    store = Refusing(str(tmp_path))
    save(store, 1, 2)
    assert [one.step for one in list_checkpoints(Run(open_store(str(tmp_path)), "r"))] == [2, 1]
    assert latest(Run(open_store(str(tmp_path)), "r")).raw_bytes == len(RAW)
    assert "could not be written" in caplog.text


def test_damaged_and_missing_statistics_are_reported_and_harm_nothing_else() -> None:
    store = open_store("memory://survey-damage")
    save(store)
    checkpoint = latest(Run(store, "r"))
    key = RunKeys("r").shard(checkpoint.attempt, shard_name(0))
    good = store.get(key)
    row, numbers = statistics(store).tensors["model/w"], np.frombuffer(RAW, np.float32)
    assert (row.minimum, row.maximum, row.elements) == (numbers.min(), numbers.max(), COUNT)
    for at in range(checkpoint.stored_bytes, len(good), 41):
        store.put(key, flipped(good, at))
        with pytest.raises(CorruptObject, match="checksum"):
            statistics(store)
        assert verify(StoreSource(store), checkpoint).ok
    store.put(key, good[:-1])
    with pytest.raises(CorruptObject, match="no statistics of"):
        statistics(store)
    copied = copy_checkpoint(StoreSource(store), checkpoint, Run(store, "copy"), lambda _: None).checkpoint
    assert verify(StoreSource(store), copied).ok
    with pytest.raises(InvalidRequest, match="saved without statistics"):
        read_statistics(StoreSource(store), copied)


def of(dtype: str, raw: bytes | bytearray | memoryview, sizes: Sequence[int], level: int = 1) -> Table:
    extremes = chunk_extremes(dtype, sizes)
    encode(fast(dtype).codec, memoryview(raw), level, extremes)
    return Table.of(chunk_table(dtype, memoryview(raw), sizes, extremes))


def truth(dtype: str, raw: bytes | memoryview) -> Any:
    kind = getattr(torch, COMPONENTS.get(dtype, dtype))
    return torch.frombuffer(bytearray(raw), dtype=kind).to(torch.float64).numpy()


def check_exact(table: Table, row: int, numbers: Any) -> None:
    finite = numbers[np.isfinite(numbers)]
    assert (table.elements[row], table.nan[row]) == (len(numbers), np.isnan(numbers).sum())
    assert table.positive_inf[row] == (numbers == np.inf).sum()
    assert table.negative_inf[row] == (numbers == -np.inf).sum()
    extremes = [finite.min(), finite.max()] if len(finite) else [np.nan, np.nan]
    assert np.array_equal([table.minimum[row], table.maximum[row]], extremes, equal_nan=True)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_all_bit_patterns_in_slices_of_all_sizes(dtype: str) -> None:
    rng, sizes = np.random.default_rng(0), [1, 2, 3, 7, 64, 1000, 1024, 1025, 5000]
    raw = rng.integers(0, 2 if dtype == "bool" else 256, sum(sizes) * ITEM_BYTES[dtype], dtype=np.uint8).tobytes()
    table, numbers = of(dtype, raw, sizes), truth(dtype, raw)
    parts = 2 if dtype in COMPONENTS else 1
    ends = np.cumsum(sizes) * parts
    for row, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        check_exact(table, row, numbers[begin:end])


def place(words: Words, bits: Sequence[int], places: Sequence[int]) -> None:
    words[list(places)] = np.array(bits, words.dtype)


@pytest.mark.parametrize("level", [1, smallest("float32").level])
@pytest.mark.parametrize("sign", ["both", "positive", "negative", "zero"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extremes_that_the_encoder_finds_are_exact(dtype: str, sign: str, level: int) -> None:
    rng = np.random.default_rng(1)
    count = 300_003  # several blocks, and words after the last one
    numbers = torch.from_numpy(rng.standard_normal(count) * 1e-3)
    numbers = {"both": numbers, "positive": numbers**2, "negative": -(numbers**2), "zero": numbers * -0.0}[sign]
    word = np.dtype(f"u{ITEM_BYTES[dtype]}")
    words = numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(word).copy()
    infinity = int(torch.tensor([np.inf], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().view(word)[0])
    last, negative = infinity - 1, 1 << (8 * word.itemsize - 1)
    changes: list[dict[int, int]] = [
        {}, {count - 1: 0}, {count - 1: last}, {0: last | negative, 200_000: last}, {17: negative}, {150_000: infinity},
        {150_000: infinity | negative, 3: infinity | negative}, {count - 2: infinity + 1},
        {299_999: infinity + 1 | negative, 5: (1 << (8 * word.itemsize)) - 1},
    ]  # fmt: skip
    for changed in changes:
        given = words.copy()
        place(given, list(changed.values()), list(changed))
        raw = given.data.cast("B")
        check_exact(of(dtype, raw, (count,), level), 0, truth(dtype, raw))
    for bits in (infinity, infinity + 1, last, negative):  # nothing else
        raw = np.full(70_000, bits, word).data.cast("B")
        check_exact(of(dtype, raw, (70_000,), level), 0, truth(dtype, raw))


def test_merging_does_not_depend_on_how_a_tensor_was_cut() -> None:
    rng = np.random.default_rng(3)
    numbers = (rng.standard_normal(600) * 10.0 ** rng.integers(-12, 12, 600)).astype(np.float64)
    numbers[[3, 77, 500]] = np.nan, np.inf, -np.inf
    numbers[100:140] = 0
    check_exact(of("float64", numbers.data.cast("B"), (600,)), 0, numbers)
    for _ in range(50):
        cuts = np.sort(rng.choice(np.arange(1, 600), rng.integers(1, 20), replace=False))
        sizes = np.diff([0, *cuts, 600]).tolist()
        merged = merge([of("float64", numbers.data.cast("B"), sizes)], np.zeros(len(sizes), np.int64), 1)
        check_exact(merged, 0, numbers)


def test_only_zeros_and_negative_infinities_are_a_mask() -> None:
    inf, nan = np.inf, np.nan
    rows = [[0, -inf, -inf], [-inf, -inf, -inf], [0, 0, 0], [0, inf, 0], [1, -inf, 0], [0, -inf, nan], [inf, inf, inf]]
    table = of("float32", np.array(rows, np.float32).data.cast("B"), [3] * len(rows))
    assert table.not_finite.tolist() == [False, False, False, True, True, True, True]
