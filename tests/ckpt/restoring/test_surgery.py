"""Restores into objects that differ from those that were saved: which tensors and optimizer state arrive, bit by bit,
and the table of what did not match."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from ckpt import Checkpointer
from ckpt.capture import modules
from ckpt.capture.parts import elements
from ckpt.capture.tensors import tensor_bytes
from ckpt.restoring import destinations
from ckptstore.errors import CorruptObject, InvalidRequest, RestoreFailed, StateMismatch
from tests.support.checkpoints import flip
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.waiting import present


def build(names: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A module of parameters. names: each with its shape, as in "net.a:4x3 head:2"."""
    root: Any = nn.Module()
    numbers = torch.Generator().manual_seed(seed)
    for text in names.split():
        name, _, shape = text.partition(":")
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        sizes = [int(size) for size in shape.split("x")]
        module.register_parameter(last, nn.Parameter(torch.randn(sizes, generator=numbers).to(dtype)))
    return root


def step(optim: Optimizer, scale: float) -> None:
    """One step of the optimizer on gradients that follow from the parameters."""
    for group in optim.param_groups:
        for one in group["params"]:
            one.grad = one.detach() * scale
    optim.step()
    optim.zero_grad()


def state_of(model: nn.Module, optim: Optimizer) -> dict[str, list[Any]]:
    """Copies of each parameter and its optimizer state, by name."""
    return {
        name: [one.detach().clone(), *(value.clone() for _, value in sorted(optim.state.get(one, {}).items()))]
        for name, one in model.named_parameters()
    }


def same(first: Iterable[Any], second: Iterable[Any]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


class Case(NamedTuple):
    there: str
    here: str
    options: dict[str, Any]
    arrives: str
    """Names here that get what the checkpoint has: HERE, or HERE=THERE."""
    table: tuple[str, ...] = ()
    """Its rows, without spaces at their ends and between columns."""


NOT, ONLY = "not in the checkpoint", "only in the checkpoint"
REPORT = {"strict": "report"}
CASES = {
    "nothing": Case("a.w:2x3 b:2", "a.w:2x3 b:2", {}, "a.w b"),
    "prefix": Case("enc.0.w:2x3 b:2", "net.0.w:2x3 b:2", {"rename": {"enc.*": "net.*"}}, "net.0.w=enc.0.w b"),
    "part": Case(
        "l.0.q.w:2x3 l.1.q.w:2x3", "l.0.k.w:2x3 l.1.k.w:2x3", {"rename": {"l.*.q.*": "l.*.k.*"}},
        "l.0.k.w=l.0.q.w l.1.k.w=l.1.q.w",
    ),
    "added": Case("a:2 b:3", "net.a:2 net.b:3", {"rename": {"*": "net.*"}}, "net.a=a net.b=b"),
    "removed": Case("net.a:2 net.b:3", "a:2 b:3", {"rename": {"net.*": "*"}}, "a=net.a b=net.b"),
    "swapped": Case("a:2 b:2", "a:2 b:2", {"rename": {"a": "b", "b": "a"}}, "a=b b=a"),
    "in a wrapper there": Case(
        "module.enc.a:2 b:2", "net.a:2 b:2", {"rename": {"enc.*": "net.*"}}, "net.a=module.enc.a b"
    ),
    "in a wrapper here": Case("a:2 b:2", "base_model.model.a:2 b:2", {"skip": "a"}, "b"),
    "first rule": Case("a.x:2 a.y:2", "b.x:2 c.y:2", {"rename": {"a.y": "c.y", "a.*": "b.*"}}, "b.x=a.x c.y=a.y"),
    "of the item": Case("a.x:2", "b.x:2", {"rename": {"model/a.*": "model/b.*"}}, "b.x=a.x"),
    "only": Case("a.x:2 b:3 c:2", "a.x:2 b:3 d:2", {"only": "a.*"}, "a.x"),
    "only some": Case("a.x:2 b:3 c:2", "a.x:2 b:3 d:2", {"only": ["a.*", "b"]}, "a.x b"),
    "skip": Case("a.x:2 b:3", "a.x:2 b:3", {"skip": "b"}, "a.x"),
    "skip what is new": Case("a:2", "a:2 head.w:2x2 head.b:2", {"skip": "head.*"}, "a"),
    "skip another shape": Case("a:2 head.w:3x2", "a:2 head.w:5x2", {"skip": ["head.*"]}, "a"),
    "skip what is gone": Case("a:2 head.w:3x2", "a:2", {"skip": ["model/head.*"]}, "a"),
    "only and skip": Case("n.a:2 n.b:2 c:2", "n.a:2 n.b:2 c:2", {"only": "n.*", "skip": "*.b"}, "n.a"),
    "rename and skip": Case(
        "enc.a:2 enc.b:2", "net.a:2 net.b:2", {"rename": {"enc.*": "net.*"}, "skip": "net.b"}, "net.a=enc.a"
    ),
    "report new": Case("a:2", "a:2 b:3", REPORT, "a", (f"model/b|[3] float32||{NOT}", f"optim/b|||{NOT}")),
    "report gone": Case("a:2 b:3", "a:2", REPORT, "a", (f"model/b||[3] float32|{ONLY}", f"optim/b|||{ONLY}")),
    "report shape": Case(
        "a:2 b:3", "a:2 b:4", REPORT, "a", ("model/b|[4] float32|[3] float32|[3] in the checkpoint, [4] here",)
    ),
    "report rename": Case(
        "a:2 enc.x:3 enc.y:4", "a:2 net.x:3 net.y:4", REPORT, "a",
        (
            f"model/net.x|[3] float32||{NOT}|'enc.*': 'net.*'", f"model/net.y|[4] float32||{NOT}|'enc.*': 'net.*'",
            f"model/enc.x||[3] float32|{ONLY}|'enc.*': 'net.*'", f"model/enc.y||[4] float32|{ONLY}|'enc.*': 'net.*'",
            f"optim/net.x|||{NOT}", f"optim/net.y|||{NOT}", f"optim/enc.x|||{ONLY}", f"optim/enc.y|||{ONLY}",
        ),
    ),
    "report renamed part": Case(
        "l.0.q.w:3 l.1.q.w:3 a:3", "l.0.k.w:3 l.1.k.w:3 a:3", REPORT | {"only": ["model/l.*", "a"]}, "a",
        tuple(
            row
            for i in (0, 1)
            for row in (
                f"model/l.{i}.k.w|[3] float32||{NOT}|'l.*.q.*': 'l.*.k.*'", f"optim/l.{i}.k.w|||{NOT}",
                f"model/l.{i}.q.w||[3] float32|{ONLY}|'l.*.q.*': 'l.*.k.*'", f"optim/l.{i}.q.w|||{ONLY}",
            )
        ),
    ),
    "report an end": Case(
        "a:2 n.gamma:3", "a:2 n.weight:3", REPORT, "a",
        (
            f"model/n.weight|[3] float32||{NOT}|'n.gamma': 'n.weight'", f"optim/n.weight|||{NOT}",
            f"model/n.gamma||[3] float32|{ONLY}|'n.gamma': 'n.weight'", f"optim/n.gamma|||{ONLY}",
        ),
    ),
    "no rename of another shape": Case(
        "a:2 x.w:3", "a:2 y.w:4", {"strict": False}, "a",
        (
            f"model/y.w|[4] float32||{NOT}", f"model/x.w||[3] float32|{ONLY}",
            f"optim/y.w|||{NOT}", f"optim/x.w|||{ONLY}",
        ),
    ),
}  # fmt: skip


def rows_of(restored: Any) -> tuple[str, ...]:
    return tuple("|".join(row).rstrip("|") for row in restored.differences)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_fits_arrives_and_all_else_stays(
    case: Case, checkpointer: Checkpointer, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = build(case.there, 1), build(case.here, 2)
    saved, optim = AdamW(old.parameters(), lr=0.1), AdamW(new.parameters(), lr=0.1)
    step(saved, 0.5)
    step(optim, 0.25)
    checkpointer.save(old, saved, 1)
    there, before = state_of(old, saved), state_of(new, optim)
    restored = present(checkpointer.restore(new, optim, **case.options))
    print(restored.differences)
    printed = capsys.readouterr().out.splitlines()
    assert tuple(sorted(rows_of(restored))) == tuple(sorted(case.table))
    assert len(printed) == 1 + len(case.table)
    assert restored.differences._repr_html_().count("<tr>") == len(printed)
    arrives = {one.partition("=")[0]: one.rpartition("=")[2] for one in case.arrives.split()}
    for name, found in state_of(new, optim).items():
        if name in arrives:
            assert same(found, there[arrives[name]]), name
        else:  # what does not fit loses its state; tensors that are left out keep it
            first = slice(1 if "strict" in case.options else None)
            assert same(found[first], before[name][first]), name


@pytest.mark.parametrize(
    ("there", "here", "options", "message"),
    [
        ("enc.a:2", "net.a:2", {"rename": {"encoder.*": "net.*"}}, r"no name matches 'encoder.[*]'. Similar: enc"),
        ("enc.a:2", "net.a:2", {"rename": {"net.*": "enc.*"}}, "no name matches 'net.[*]'"),
        ("a:2 b:2", "a:2 b:2", {"rename": {"a": "b"}}, "'a' and 'b' would both be model/b"),
        ("a.x:2", "b.x:2", {"rename": {"a.*": "b.x"}}, "'a.[*]' and 'b.x' differ in the number of [*]"),
        ("a:2", "a:2", {"only": "b*"}, "no name matches 'b[*]'"),
        ("head.w:2", "head.w:2", {"skip": "haed.*"}, "no name matches 'haed.[*]'. Similar: head"),
        ("a:2", "a:3", {"grow": {"b": True}}, "no name matches 'b'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    there: str, here: str, options: dict[str, Any], message: str, checkpointer: Checkpointer
) -> None:
    new = build(here, 2)
    before = state_of(new, SGD(new.parameters()))
    checkpointer.save(build(there, 1), None, 1)
    with pytest.raises(InvalidRequest, match=message):
        checkpointer.restore(new, **options)
    assert same(*([one[0] for one in found.values()] for found in (before, state_of(new, SGD(new.parameters())))))
    with pytest.raises(InvalidRequest, match="no module"):
        checkpointer.restore(only="a", counter=1)


@pytest.mark.parametrize(
    ("there", "here", "options", "row"),
    [
        ("a:4x3", "a:6x3", {"grow": {"a": False}}, r"model/a +\[6, 3\] float32 +\[4, 3\] float32 +\[4, 3\] in"),
        ("a:6x3", "a:4x3", {"grow": {"a": True}}, r"model/a +\[4, 3\] float32 +\[6, 3\] float32"),
        ("a:4x3", "a:6x3x1", {"grow": "a"}, r"model/a +\[6, 3, 1\] float32 +\[4, 3\] float32"),
        ("enc.a:4", "net.a:4", {}, r"model/net.a +\[4\] float32 +not in the checkpoint +'enc.\*': 'net.\*'"),
        (" ".join(f"x{i}:2" for i in range(12)), "a:2", {}, "and 5 more"),
    ],
)
def test_a_mismatch_shows_the_first_rows(
    there: str, here: str, options: dict[str, Any], row: str, checkpointer: Checkpointer
) -> None:
    checkpointer.save(build(there, 1), None, 1)
    with pytest.raises(StateMismatch, match=row):
        checkpointer.restore(build(here, 2), **options)


PREFIXES = (
    "module.", "base_model.model.", "net._orig_mod.", "net._fsdp_wrapped_module.", "net._checkpoint_wrapped_module."
)  # fmt: skip
SIDES, KINDS = ("there", "here", "both"), ("whole", "staged", "not strict")


@pytest.mark.parametrize(
    ("prefix", "side", "kind"),
    # Each pair of two of them occurs.
    [(PREFIXES[p], SIDES[s], KINDS[(p + s) % 3]) for p in range(len(PREFIXES)) for s in range(len(SIDES))],
)
def test_prefixes_of_wrappers_are_no_reason_to_fail(
    prefix: str, side: str, kind: str, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of other programs have these in their names."""
    plain = "net." if prefix.startswith("net.") else ""
    one, other = (f"{prefix}a.w:2x3 {prefix}a.b:2 head:2", f"{plain}a.w:2x3 {plain}a.b:2 head:2")
    old = build(other if side == "here" else one, 1)
    new = build(other if side == "there" else one.replace("_orig_mod", "_checkpoint_wrapped_module"), 2)
    saved, optim = (AdamW(model.parameters(), lr=lr) for model, lr in ((old, 0.1), (new, 0.2)))
    step(saved, 0.5)
    with monkeypatch.context() as patched:
        patched.setattr(modules, "_WRAPPERS", ())
        checkpointer.save(old, saved, 1)
    if kind == "staged":
        with checkpointer.restore_in_stages() as stages:
            found = [stages.model(new), stages.optimizers(optim)]
    else:
        found = [checkpointer.restore(new, optim, strict=kind == "whole")]
    assert [rows_of(present(one)) for one in found] == [()] * len(found)
    for first, second in zip(state_of(old, saved).values(), state_of(new, optim).values(), strict=True):
        assert same(first, second)
    assert optim.param_groups[0]["lr"] == 0.1


def test_wrappers_that_leave_two_names_are_not_matched(checkpointer: Checkpointer) -> None:
    checkpointer.save(build("module.a:2 base_model.model.a:2", 1), None, 1)
    with pytest.raises(StateMismatch, match="not in the checkpoint: model/a; only in the checkpoint: model/base_model"):
        checkpointer.restore(build("a:2", 2))


def test_tied_tensors_are_left_out_and_grow_as_one(checkpointer: Checkpointer) -> None:
    def tied(rows: int, seed: int) -> Any:
        model = build(f"embed.w:{rows}x2 head.w:{rows}x2 body:3", seed)
        model.get_submodule("head").w = model.get_submodule("embed").w
        return model

    old = tied(4, 1)
    checkpointer.save(old, None, 1)
    new = tied(4, 2)
    before = new.head.w.detach().clone()
    checkpointer.restore(new, skip="embed.*")
    assert torch.equal(new.head.w, before)
    assert torch.equal(new.body, old.body)
    checkpointer.restore(new, only="head.*")
    assert torch.equal(new.head.w, old.head.w)
    larger = tied(6, 3)
    checkpointer.restore(larger, grow="head.w")
    assert torch.equal(larger.embed.w[:4], old.embed.w)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("small", "large"), [("4x3", "6x3"), ("4x3", "6x5"), ("4", "9")])
def test_a_larger_tensor_takes_what_there_is(small: str, large: str, stepped: bool, checkpointer: Checkpointer) -> None:
    old, new = build(f"embed.w:{small} a:2", 1), build(f"embed.w:{large} a:2", 2)
    saved, optim = (AdamW(model.parameters(), amsgrad=True) for model in (old, new))
    step(saved, 0.5)
    if stepped:
        step(optim, 0.5)
    old.embed.w.grad = old.embed.w.detach() * 2
    checkpointer.save(old, saved, 1, grads=True)
    expected = new.embed.w.detach().clone()
    part = tuple(map(slice, old.embed.w.shape))
    expected[part] = old.embed.w.detach()
    restored = present(checkpointer.restore(new, optim, grow={"*embed*.w": True}))
    assert rows_of(restored) == ()
    assert torch.equal(new.embed.w, expected)
    assert torch.equal(new.embed.w.grad[part], old.embed.w.grad)
    assert new.embed.w.grad.count_nonzero() == old.embed.w.numel()
    assert same(state_of(old, saved)["a"], state_of(new, optim)["a"])
    for key, value in optim.state[new.embed.w].items():
        filled = torch.zeros(new.embed.w.shape)
        filled[part] = saved.state[old.embed.w][key] if key != "step" else 0
        assert torch.equal(value, torch.tensor(1.0) if key == "step" else filled), key
    step(optim, 0.5)


def test_state_that_does_not_show_how_it_grows_is_refused(checkpointer: Checkpointer) -> None:
    old, new = build("w:4x3", 1), build("w:6x3", 2)
    saved = Adafactor(old.parameters())
    step(saved, 0.5)
    checkpointer.save(old, saved, 1)
    with pytest.raises(StateMismatch, match=r"row_var has the shape \[4, 1\], which does not show"):
        checkpointer.restore(new, Adafactor(new.parameters()), grow="w", strict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("large", ["3", "5"])
def test_types_are_converted_only_if_the_caller_says_so(
    dtype: torch.dtype, large: str, checkpointer: Checkpointer
) -> None:
    old, new = build("a:64x3 b:2x2", 1), build(f"a:64x{large} b:2x2", 2, dtype)
    with torch.no_grad():
        old.b.copy_(torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8], [torch.nan, -torch.inf]]))
    saved, optim = (AdamW(model.parameters(), lr=0.1) for model in (old, new))
    step(saved, 0.5)
    checkpointer.save(old, saved, 1)
    with pytest.raises(StateMismatch, match="float32 in the checkpoint, torch"):
        checkpointer.restore(new, optim)
    restored = present(checkpointer.restore(new, optim, cast=True, grow="a"))
    assert rows_of(restored) == ()
    for name, (value, first, second, steps) in state_of(new, optim).items():
        there = state_of(old, saved)[name]
        part = tuple(map(slice, there[0].shape))
        for one, other in zip((value, first, second), there[:3], strict=True):
            assert one.dtype == dtype
            assert torch.equal(one[part].nan_to_num(7), other.to(dtype).nan_to_num(7)), name
        assert steps.dtype == torch.float32
    step(optim, 0.5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_parameters_are_filled_by_rounding(dtype: torch.dtype, checkpointer: Checkpointer) -> None:
    old, new = build("a:64x33", 1), build("a:64x33", 2).to(dtype).requires_grad_(False)
    checkpointer.save(old, None, 1)
    memory = new.a.data_ptr()
    checkpointer.restore(new, cast=True)
    assert (new.a.data_ptr(), new.a.dtype) == (memory, dtype)
    assert torch.equal(new.a.view(torch.uint8), old.a.detach().to(dtype).view(torch.uint8))
    other = build("a:64x33", 3)
    checkpointer.save(new, None, 2)
    checkpointer.restore(other, cast=True)
    assert torch.equal(other.a, new.a.float())


CONFIGURATIONS: dict[str, Callable[[Any], Any]] = {
    "int8": lambda q: q.Int8WeightOnlyConfig(),
    "int8 of the whole": lambda q: q.Int8WeightOnlyConfig(granularity=q.PerTensor()),
    "float8": lambda q: q.Float8WeightOnlyConfig(),
    "int8, activations too": lambda q: q.Int8DynamicActivationInt8WeightConfig(),
    "int4 in groups": lambda q: q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(16)),  # type: ignore[attr-defined]
    "asymmetric": lambda q: q.IntxWeightOnlyConfig(mapping_type=q.MappingType.ASYMMETRIC),
}
"""What torchao can make on a CPU."""


class Quantizer:
    """torchao's `quantize_`: of a model or, called, of one weight."""

    def __init__(self, name: str) -> None:
        self._library = pytest.importorskip("torchao.quantization")
        self._configuration = CONFIGURATIONS[name](self._library)
        self.largest: list[float] = []
        """Of the elements of each weight that it was called with."""

    def quantize(self, model: nn.Module) -> Any:
        self._library.quantize_(model, self._configuration)
        return model

    def __call__(self, weight: torch.Tensor) -> Any:
        self.largest.append(weight.abs().max().item())
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return self.quantize(layer).weight


def linears(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)).to(dtype)


def in_memory(model: nn.Module) -> list[torch.Tensor]:
    """All plain tensors in the memory of a model."""
    named = model.named_parameters(remove_duplicate=False)
    return [plain.detach() for _, one in named for plain in elements(one).values()]


def places(model: nn.Module) -> list[Any]:
    return [*map(id, model.parameters()), *((one.data_ptr(), one.dtype) for one in in_memory(model))]


@pytest.mark.parametrize(
    ("there", "here"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_quantized_model_gets_what_quantizing_the_restored_one_gives(
    name: str, there: torch.dtype, here: torch.dtype, checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, in one piece or one weight at a time, under other names, whole or in stages."""
    quantizer, plain, other = Quantizer(name), linears(1, there), Quantizer(name).quantize(linears(2, here))
    checkpointer.save(nn.ModuleDict({"old": plain}), None, 1)
    checkpointer.save(plain, None, 2, table=torch.ones(3))
    wanted, before = in_memory(quantizer.quantize(linears(1, there).to(here))), places(other)
    rename, cast = {"old.*": "*"}, {"model/*.weight": quantizer}
    restored = present(checkpointer.restore(other, checkpoint=1, rename=rename, cast=cast, strict="report"))
    assert rows_of(restored) == ()
    assert same(in_memory(other), wanted)
    for one in in_memory(other):
        one.zero_()
    with monkeypatch.context() as patched, checkpointer.restore_in_stages(cast=cast) as stages:
        patched.setattr(destinations, "CAST_ELEMENTS", 1)
        stages.model(other)
        table = present(stages.extras(table=torch.zeros(3))).values["table"]
    assert torch.equal(table, torch.ones(3))
    assert same(in_memory(other), wanted)
    assert places(other) == before
    other(torch.zeros(1, 64, dtype=here))
    assert [*map(bool, quantizer.largest)] == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 3, "trials, then values"


def test_what_no_function_makes_is_refused_by_name(checkpointer: Checkpointer) -> None:
    """Before anything is changed: there is none, or it makes another kind of tensor, by its class or options."""
    quantizer, others = Quantizer("int8"), [Quantizer(name) for name in ("float8", "int8, activations too")]
    model = quantizer.quantize(linears(2))
    checkpointer.save(linears(1), None, 1)
    before = [one.clone() for one in in_memory(model)]
    for cast in (False, True, {"0.weight": quantizer}, {"head.*": quantizer}):
        with pytest.raises(StateMismatch, match=r"model/1\.weight: not a Int8Tensor of qdata, scale, zero") as caught:
            checkpointer.restore(model, cast=cast)
        assert "nothing was changed" in caught.value.hint
    makes: list[Callable[[Any], Any]] = [*others, lambda weight: weight, lambda _: None]
    for make in makes:
        with pytest.raises(StateMismatch, match=r"model/1\.weight: the function of cast= makes another kind"):
            checkpointer.restore(model, strict=False, cast={"1.weight": make, "*": quantizer})
    with pytest.raises(RestoreFailed, match=r"cannot restore: .*no such kernel"):
        checkpointer.restore(model, cast={"*": raising})
    assert same(in_memory(model), before)
    assert set(quantizer.largest) == {0.0}
    restored = present(checkpointer.restore(model, cast={"0.*": quantizer}, strict="report"))
    assert [row[0] for row in restored.differences] == ["model/1.weight", "model/2.weight"]
    wanted = in_memory(quantizer.quantize(linears(1)))
    assert same(in_memory(model)[:4], wanted[:4])
    assert same(in_memory(model)[4:7], before[4:7])
    model[0].weight = quantizer(torch.zeros(32, 65))
    with pytest.raises(StateMismatch, match=r"model/0\.weight: not a"):
        checkpointer.restore(model, cast={"*": quantizer})


def raising(weight: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no such kernel")


def test_a_function_that_makes_another_kind_of_the_values_is_an_error(checkpointer: Checkpointer) -> None:
    first, second = Quantizer("int8"), Quantizer("float8")

    def either(weight: torch.Tensor) -> Any:
        return second(weight) if weight.any() else first(weight)

    model = first.quantize(linears(2))
    checkpointer.save(linears(1), None, 1)
    with pytest.raises(StateMismatch, match=r"model/0\.weight: the function of cast= makes another kind") as caught:
        checkpointer.restore(model, cast={"*": either})
    assert "build the objects again" in caught.value.hint


def test_tied_weights_are_made_of_one_entry(checkpointer: Checkpointer) -> None:
    quantizer, plain = Quantizer("int8"), linears(1)
    tied = quantizer.quantize(linears(2))
    tied[2].weight = tied[1].weight
    checkpointer.save(plain, None, 1)
    with pytest.raises(StateMismatch, match=r"model/2\.weight: not a"):
        checkpointer.restore(tied, cast={"*": quantizer})
    plain[2].weight = plain[1].weight
    checkpointer.save(plain, None, 2)
    checkpointer.restore(tied, cast={"*": quantizer})
    assert same(in_memory(tied), in_memory(quantizer.quantize(plain)))


def test_a_damaged_weight_gives_way_to_the_checkpoint_before(
    checkpointer: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last round, when others have been made. Nothing of the damaged one stays."""
    monkeypatch.setattr(destinations, "CAST_ELEMENTS", 1)
    quantizer, older, newer = Quantizer("int8"), linears(1), linears(3)
    checkpointer.save(older, None, 1)
    checkpoint = checkpointer.save(newer, None, 2)
    values = bytes(tensor_bytes(next(newer[2].parameters()).detach()))
    (shard,) = [path for path in tmp_path.rglob("*") if path.is_file() and values in path.read_bytes()]
    flip(shard, shard.read_bytes().index(values) + 5)
    model = quantizer.quantize(linears(2))
    restored = present(checkpointer.restore(model, cast={"*": quantizer}))
    assert (restored.step, [id for id, _ in restored.skipped]) == (1, [checkpoint.id])
    assert same(in_memory(model), in_memory(quantizer.quantize(older)))
    with pytest.raises(CorruptObject):
        checkpointer.restore(model, checkpoint=2, cast={"*": quantizer})


@pytest.mark.parametrize("kind", ["int8", "float8 of PyTorch"])
def test_memory_for_what_is_converted_is_bounded(kind: str, tmp_path: Path) -> None:
    """The peak of a process that restores 192 MiB in rounds of 16 MiB."""
    arguments = {"store": str(tmp_path / "store"), "quantized": kind == "int8"}
    (found,) = run_scenario(Scenario(f"{__name__}:converted", 1, arguments), tmp_path / "scenario")
    assert found["equal"]
    assert found["peak"] < 96 << 20, found


def converted(store: str, quantized: bool) -> dict[str, Any]:
    def made(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))

    def quantize(model: nn.Module) -> nn.Module:
        return quantizer.quantize(model) if quantized else model.to(torch.float8_e4m3fn)

    quantizer = Quantizer("int8")
    destinations.CAST_ELEMENTS = 4 << 20
    with Checkpointer(store, run="r", retain_snapshot_s=0) as run:
        run.save(made(1), None, 1)
    gc.collect()
    with torch.device("meta"):
        model = made(2).requires_grad_(False)
    for layer in model.children():
        quantize(layer.to_empty(device="cpu"))
    with Checkpointer(store, run="r") as run:
        quantizer(torch.zeros(1024, 1024))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # give back what was freed before
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _memory("VmRSS")
        run.restore(model, cast={"*": quantizer})
        peak = _memory("VmHWM") - before
    wanted = in_memory(quantize(made(1).requires_grad_(False)))
    return {
        "equal": same([x.view(torch.uint8) for x in in_memory(model)], [x.view(torch.uint8) for x in wanted]),
        "peak": peak,
    }


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) << 10


@pytest.mark.parametrize(("first", "second", "fits"), [(0.1, 0.1, True), (0.1, 0.2, False)])
def test_options_go_with_their_parameters(first: float, second: float, fits: bool, checkpointer: Checkpointer) -> None:
    old = build("enc.a:2 enc.b:2 enc.c:2", 1)
    a, b, c = old.parameters()
    saved = AdamW([{"params": [a, c], "lr": first}, {"params": [b], "lr": second}])
    step(saved, 0.5)
    checkpointer.save(old, saved, 1)
    new = build("net.a:2 net.b:2 net.c:2", 2)
    a, b, c = new.parameters()
    split = AdamW([{"params": [b]}, {"params": [c]}, {"params": [a]}], lr=1.0)
    checkpointer.restore(new, split, rename={"enc.*": "net.*"})
    assert [group["lr"] for group in split.param_groups] == [second, first, first]
    for one, other in zip(state_of(old, saved).values(), state_of(new, split).values(), strict=True):
        assert same(one, other)
    merged = AdamW(new.parameters(), lr=1.0)
    if fits:
        checkpointer.restore(new, merged, rename={"enc.*": "net.*"})
        assert merged.param_groups[0]["lr"] == first
        return
    with pytest.raises(StateMismatch, match=r"lr was 0\.1 for net\.a and 0\.2 for net\.b"):
        checkpointer.restore(new, merged, rename={"enc.*": "net.*"}, strict=False)
    checkpointer.restore(new, merged, rename={"enc.*": "net.*"}, skip="net.b")
    assert merged.param_groups[0]["lr"] == first


class Old(nn.Linear):
    """Of a format whose second version holds the weight transposed."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, metadata, *more)


def test_the_version_of_a_format_goes_with_a_root(checkpointer: Checkpointer) -> None:
    old, new = Old(2, 2), nn.ModuleDict({"x": Old(2, 2)})
    checkpointer.save(old, None, 1)
    checkpointer.restore(new, rename={"*": "x.*"})
    checkpointer.save(new, None, 2)
    assert torch.equal(old.weight, new.get_parameter("x.weight"))
    again = Old(2, 2)
    checkpointer.restore(again, rename={"x.*": "*"})
    assert torch.equal(old.weight, again.weight)


@pytest.mark.parametrize("new", ["b", "module"])
def test_the_version_of_a_format_goes_with_its_names(new: str, checkpointer: Checkpointer) -> None:
    models: list[Any] = [nn.ModuleDict({name: nn.ModuleDict({"x": Old(2, 2)})}) for name in ("a", new)]
    checkpointer.save(models[0], None, 1)
    checkpointer.restore(models[1], rename={"a.*": f"{new}.*"})
    assert torch.equal(models[0]["a"]["x"].weight, models[1][new]["x"].weight)


def resharded(store: str, number: int) -> dict[str, bool]:
    """Of two ranks under fully_shard: what a restore with rename and grow gives, beside the same on one process."""
    there, here = "enc.a:5x4 enc.b:7 embed:6x4", "net.a:5x4 net.b:7 embed:9x4"
    options: dict[str, Any] = {"rename": {"enc.*": "net.*"}, "grow": {"embed": True}}
    whole = []
    for sharded in (False, True):
        models = [build(there, 1), build(here, 2)]
        for model in models if sharded else ():
            fully_shard(model)
        saved, optim = (AdamW(model.parameters(), lr=0.1) for model in models)
        step(saved, 0.5)
        group: Any = "all" if sharded else "solo"
        with Checkpointer(f"{store}-{group}-{number * (not sharded)}", run="r", writer="thread", group=group) as run:
            run.save(models[0], saved, 1)
            run.restore(models[1], optim, **options)
            with pytest.raises(StateMismatch, match=r"net\.a .*'enc\.\*': 'net\.\*'"):
                run.restore(models[1], optim, skip="embed")
        step(optim, 0.5)
        whole.append({name: [_full(one) for one in found] for name, found in state_of(models[1], optim).items()})
    return {name: same(found, whole[1][name]) for name, found in whole[0].items()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_two_ranks_of_sharded_models_rename_and_grow(tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:in_ranks", 2, {"store": str(tmp_path / "store")})
    assert (
        run_scenario(scenario, tmp_path / "scenario")
        == [{"net.a": True, "net.b": True, "embed": True, "parts": True, "quantized": True}] * 2
    )


def in_ranks(store: str) -> dict[str, bool]:
    rank = torch.distributed.get_rank()
    own = {"parts": own_parts(f"{store}-parts", rank), "quantized": quantized_in_ranks(f"{store}-int8", rank)}
    return resharded(store, rank) | own


def quantized_in_ranks(store: str, rank: int) -> bool:
    """Both have the first layer; one has more, and so more rounds. What both read, one of them reads."""
    quantizer = Quantizer("int8")
    destinations.CAST_ELEMENTS = 1
    with Checkpointer(store, run="r", writer="thread", replica_reads="broadcast") as run:
        run.save(linears(1)[: 1 + 2 * rank], None, 1)
        model = quantizer.quantize(linears(2 + rank))[: 1 + 2 * rank]
        run.restore(model, cast={"*": quantizer})
    return same(in_memory(model), in_memory(quantizer.quantize(linears(1))[: 1 + 2 * rank]))


def own_parts(store: str, rank: int) -> bool:
    """Each rank has other names, as in a pipeline: the patterns are about the names of all ranks."""
    old, new = build(f"module.enc.{rank}.w:3 enc.{rank}.v:2", rank), build(f"net.{rank}.w:3 net.{rank}.v:2", 5)
    saved, optim = (AdamW(model.parameters(), lr=0.1) for model in (old, new))
    step(saved, 0.5)
    with Checkpointer(store, run="r", writer="thread") as run:
        run.save(old, saved, 1)
        restored = present(run.restore(new, optim, rename={"enc.*": "net.*"}, skip="net.1.v"))
    there, here = (list(state_of(*pair).values()) for pair in ((old, saved), (new, optim)))
    alike = [same(there[0], here[0]), torch.equal(there[1][0], here[1][0])]
    return rows_of(restored) == () and alike == [True, rank == 0]
