"""What a step reads of its arguments on the host is never a stale one: tensors' contents, arrays, other objects."""

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import xlatrainer as xla
from xlatrainer.backend import counters
from xlatrainer.backend.replay.arguments import flattened
from xlatrainer.backend.replay.step import ReplayedStep

REPEATS = 5  # the second call agrees with the first; the others are replayed
BEFORE, AFTER = [1.0, 2.0], [3.0, 5.0]

# Of weights on the device and a CPU tensor, which each reads in its way.
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tolist": lambda w, x: w.sum() * sum(x.tolist()),
    "item": lambda w, x: w.sum() * x.max().item(),
    "a number": lambda w, x: w.sum() * float(x[1]),
    "numpy": lambda w, x: w.sum() * float(x.numpy().sum()),
    "asarray": lambda w, x: w.sum() * float(np.asarray(x).sum()),
    "a branch": lambda w, x: w.sum() if x[0] < 2 else w.prod(),
    "an iteration": lambda w, x: sum((w.sum() * row for row in x), w.sum()),
    "an operator's result": lambda w, x: (w * (x * 2).to(w.device).sum()).sum(),
    "another dtype": lambda w, x: (w * x.to(torch.float64).to(w.device).sum()).sum(),
    "a part": lambda w, x: (w * x[1:].to(w.device)).sum(),
    "read and copied": lambda w, x: (w * x.to(w.device).sum() * x.max().item()).sum(),
    "a scalar tensor": lambda w, x: w.sum() * x[0],
    "in a list": lambda w, x: w.sum() * torch.stack([x, x]).sum().item(),
}


def _run(step: Callable[..., Any], *arguments: Any) -> float:
    return float(step(*arguments).item())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", READS)
def test_contents_that_are_read_are_compared(name: str, in_place: bool) -> None:
    read, weights = READS[name], torch.tensor([1.0, 2.0, 4.0])
    on_device = weights.to("xla")
    step = xla.compile(lambda x: read(on_device, x))
    counters.reset()
    given = torch.tensor(BEFORE)
    for _ in range(REPEATS):
        if not in_place:
            given = torch.tensor(BEFORE)
        assert _run(step, given) == _run(read, weights, given)
    assert counters.value("Replay") >= REPEATS - 2
    given = given.copy_(torch.tensor(AFTER)) if in_place else torch.tensor(AFTER)
    assert _run(step, given) == _run(read, weights, given)


COPIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to": lambda w, x: (w * x.to("xla").sum()).sum(),
    "detach, to": lambda w, x: (w * x.detach().contiguous().to("xla", non_blocking=True).sum()).sum(),
    "copy_": lambda w, x: (w * torch.empty(2, device="xla").copy_(x).sum()).sum(),
    "shape, to": lambda w, x: (w * x.to("xla").sum()).sum() * x.shape[0] * len(x) * x.dim(),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_is_copied_to_the_device_only_may_change(name: str) -> None:
    weights = torch.tensor([1.0, 2.0, 4.0], device="xla")
    step = xla.compile(lambda x: COPIES[name](weights, x))
    counters.reset()
    for number in range(REPEATS):
        x = torch.tensor([1.0, float(number)])
        assert _run(step, x) == _run(COPIES[name], weights, x)
    assert counters.value("Replay") >= REPEATS - 2


def test_what_is_not_used_may_change() -> None:
    weights = torch.tensor([1.0, 2.0], device="xla")
    step = xla.compile(lambda x, identifiers: (weights * x.to("xla")).sum())
    counters.reset()
    for number in range(REPEATS):
        assert _run(step, torch.ones(2), torch.tensor([number, 7])) == 3.0
    assert counters.value("Replay") >= REPEATS - 2


def test_a_large_tensor_that_is_read_is_refused() -> None:
    weights = torch.tensor([1.0, 2.0], device="xla")
    step = ReplayedStep(lambda x: weights.sum() * x[0].item())
    for value in (1.0, 1.0, 1.0, 2.0):
        assert _run(step, torch.full((600_000,), value)) == 3.0 * value
    assert "CPU tensor [600000] among its arguments" in step.reason


def test_an_argument_on_the_host_that_is_written() -> None:
    weights, count = torch.tensor([1.0, 2.0], device="xla"), torch.zeros(())

    def counted(count: Tensor) -> Tensor:
        count += 1
        return weights.sum()

    step = ReplayedStep(counted)
    for _ in range(REPEATS):
        step(count)
    assert count.item() == REPEATS
    assert "changes a CPU tensor" in step.reason


def _in_place(array: Any) -> None:
    array[:] = AFTER


def _attribute(options: Any) -> None:
    options.scale = 8.0


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "array": (lambda: np.array(BEFORE), lambda array: float(array.sum()), _in_place),
    "sparse tensor": (
        lambda: torch.tensor(BEFORE).to_sparse(),
        lambda tensor: float(tensor.to_dense().sum()),
        lambda tensor: tensor._values().copy_(torch.tensor(AFTER)),
    ),
    "method": (
        lambda: torch.nn.Threshold(2.0, 3.0).forward,
        lambda threshold: float(threshold(torch.tensor(1.0))),
        lambda threshold: setattr(threshold.__self__, "value", 8.0),
    ),
    "namespace": (lambda: SimpleNamespace(scale=3.0), lambda options: options.scale, _attribute),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_other_objects_are_not_followed(name: str) -> None:
    make, scale, change = OBJECTS[name]
    weights, given = torch.tensor([1.0, 2.0], device="xla"), make()
    step = ReplayedStep(lambda x, given: (weights * x).sum() * scale(given))
    x = torch.ones(2, device="xla")
    for _ in range(REPEATS):
        assert _run(step, x, given) == 3.0 * scale(given)
    change(given)
    assert _run(step, x, given) == 3.0 * scale(given)
    assert "into which replay does not look" in step.reason


PLAIN = {
    "none": None,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "numpy's number": np.float32(2),
    "a type": int,
    "a function of torch": torch.nn.functional.relu,
    "range": range(3),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_arguments_are_replayed(name: str) -> None:
    weights = torch.tensor([1.0, 2.0], device="xla")
    step = xla.compile(lambda x, plain: (weights * x).sum())
    counters.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(REPEATS):
            assert _run(step, torch.ones(2, device="xla"), PLAIN[name]) == 3.0
    assert counters.value("Replay") >= REPEATS - 2


def test_zeros_of_both_signs_are_different_arguments() -> None:
    weights = torch.tensor([1.0, 2.0], device="xla")
    step = xla.compile(lambda sign: weights.sum() * math.copysign(1.0, sign if isinstance(sign, float) else sign.real))
    for zero, expected in ((0.0, 3.0), (-0.0, -3.0), (complex(-0.0, 0.0), -3.0), (complex(0.0, 0.0), 3.0)):
        for _ in range(REPEATS):
            assert _run(step, zero) == expected
    assert step(np.float32(-0.0)).item() == -3.0


class Pair(NamedTuple):
    first: Any
    second: Any


def test_the_same_leaves_in_another_structure_are_other_arguments() -> None:
    weights = torch.tensor([1.0, 2.0], device="xla")
    step = xla.compile(lambda *args, **named: weights.sum() * len(repr((args, named)).replace(" ", "")))
    x = 1
    structures: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x), {}), (((x, x),), {}), (([x, x],), {}), ((Pair(x, x),), {}), ((x, None, x), {}), ((x,), {"ab": x}),
        ((x,), {"c": x}), (({"a": x, "b": {"c": x}},), {}), (({"b": x, "a": [x]},), {}), ((OrderedDict(d=x),), {}),
    ]  # fmt: skip
    for _ in range(REPEATS):
        for args, named in structures:
            assert step(*args, **named).item() == 3 * len(repr((args, named)).replace(" ", ""))


@pytest.mark.parametrize("kind", [tuple, list])
def test_arguments_are_laid_out_as_torch_does(kind: type) -> None:
    tree = kind([1, {"b": None, "a": (2.5, [])}, Pair("c", OrderedDict(d=4)), kind([])])
    assert flattened(tree)[0] == tree_flatten(tree)[0]


def test_several_steps_at_once() -> None:
    """The steps of one program, too, have what the function read of each batch compared."""
    weights = torch.tensor([1.0, 2.0, 4.0])
    trainable = torch.nn.Parameter(weights.to("xla"))
    optimizer = torch.optim.SGD([trainable], lr=0.5)

    def step(lengths: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (trainable * lengths.max().item()).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    replayed = ReplayedStep(step)
    expected = weights.clone()
    for scale in (2.0, 2.0, 2.0, 2.0, 3.0):
        replayed.many([(torch.tensor([1.0, scale]),), (torch.tensor([scale, 1.0]),)])
        expected -= 2 * 0.5 * scale
    torch.testing.assert_close(trainable.detach().cpu(), expected)
