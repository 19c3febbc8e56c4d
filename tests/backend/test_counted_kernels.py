"""Results that are as long as data says: found on the device, of which only a number is read, and that is counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from xlatrainer.backend import counters

X = torch.arange(24.0).view(6, 4).sub(9).remainder(7).sub(3)
MASK = X > 0
ROWS = X[:, 0] > 0
WHOLE = torch.tensor([[3, 1, 3, 3], [1, 1, 0, 3], [3, 1, 3, 3]])

Call = Callable[..., Any]


def _on(device: str, call: Call, inputs: tuple[torch.Tensor, ...]) -> Any:
    return call(*[tensor.clone().to(device) for tensor in inputs])


def _check(call: Call, *inputs: torch.Tensor, reads: dict[str, int]) -> None:
    """The same as on the CPU, with these counters of reading and no others."""
    expected = _on("cpu", call, inputs)
    counters.reset()
    actual = _on("xla", call, inputs)
    assert {name: count for name, count in counters.snapshot().items() if "::" in name} == reads
    torch.testing.assert_close(tree_map(lambda tensor: tensor.cpu(), actual), expected, equal_nan=True)


def _put(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x[mask] = value
    return x


def _put_columns(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x[:, mask] = value
    return x


def _with_gradient(call: Call) -> Call:
    def graded(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        x = x.requires_grad_()
        result = call(x, *rest)
        return result.detach(), torch.autograd.grad((result * result).sum(), x)[0]

    return graded


def _index(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask]


@pytest.mark.parametrize("tensor", [MASK, X, torch.zeros(2, 3), torch.zeros(0, 3), torch.tensor(3.0)], ids=str)
def test_nonzero(tensor: torch.Tensor) -> None:
    once = {"sync::nonzero": 1}
    _check(torch.nonzero, tensor, reads=once)
    _check(torch.argwhere, tensor, reads=once)
    _check(lambda x: torch.nonzero(x, as_tuple=True), tensor, reads=once)
    _check(lambda x: torch.where(x), tensor, reads=once)
    _check(lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64, device=x.device)), tensor, reads=once)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_reading_by_a_mask() -> None:
    once = {"sync::index": 1}
    _check(_index, X, MASK, reads=once)
    _check(_index, X, ROWS, reads=once)
    _check(_index, X, ROWS.to(torch.uint8), reads=once)
    _check(lambda x, mask: x[:, mask], X, MASK[0], reads=once)
    _check(lambda x, mask: x[None, mask], X, ROWS, reads=once)
    _check(lambda x, mask: x[mask, 1], X, ROWS, reads=once)
    _check(
        lambda x, mask, other: x[mask, other],
        X[:4],
        torch.tensor([True, False, True, False]),
        torch.tensor([3, 1]),
        reads=once,
    )
    _check(lambda x: x[MASK], X, reads={})  # of a mask on the CPU nothing has to be read
    _check(_with_gradient(_index), X, MASK, reads=once)
    _check(_with_gradient(_index), X, ROWS, reads=once)


def test_writing_by_a_mask_reads_nothing() -> None:
    selected = int(MASK.sum())
    for value in (torch.tensor(7.0), torch.tensor([7.0]), torch.arange(float(selected))):
        _check(_put, X, MASK, value, reads={})
    rows = int(ROWS.sum())
    for value in (torch.arange(4.0), torch.rand(rows, 4), torch.rand(1, 1, 4), torch.rand(rows, 1)):
        _check(_put, X, ROWS, value, reads={})
    for value in (torch.tensor(2.0), torch.rand(6, 1), torch.rand(6, int(MASK[0].sum()))):
        _check(_put_columns, X, MASK[0], value, reads={})
    _check(_put, X, torch.zeros(6, 4, dtype=torch.bool), torch.zeros(0), reads={})
    _check(lambda x, mask, v: x.index_put_((mask,), v, accumulate=True), X, MASK, torch.rand(selected), reads={})
    _check(lambda x, mask, v: x.index_put_((mask,), v, accumulate=True), MASK, ~MASK, torch.tensor(True), reads={})
    mixed = {"sync::index_put_": 1}
    _check(lambda x, mask, at: x.index_put_((mask, at), x[0, 0].clone()), X, ROWS, torch.tensor(1), reads=mixed)


def test_masked_select() -> None:
    once = {"sync::masked_select": 1}
    _check(torch.masked_select, X, MASK, reads=once)
    _check(torch.masked_select, X, MASK[0], reads=once)
    _check(_with_gradient(torch.masked_select), X, MASK, reads=once)
    _check(lambda x, mask: torch.masked_select(x, mask, out=torch.empty(0, device=x.device)), X, MASK, reads=once)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_unique(inverse: bool, counts: bool) -> None:
    options = {"return_inverse": inverse, "return_counts": counts}
    nan = torch.tensor([1.0, float("nan"), 0.0, -0.0, float("nan"), 1.0])
    for tensor in (WHOLE, nan, MASK, torch.zeros(0), torch.tensor(3.0)):
        _check(lambda x: torch.unique(x, **options), tensor, reads={"sync::_unique2": 1})
        _check(lambda x: torch.unique_consecutive(x, **options), tensor, reads={"sync::unique_consecutive": 1})
    for dim in (0, 1):
        _check(lambda x, d=dim: torch.unique(x, dim=d, **options), WHOLE, reads={"sync::unique_dim": 1})
        consecutive = {"sync::unique_dim_consecutive": 1}
        _check(lambda x, d=dim: torch.unique_consecutive(x, dim=d, **options), WHOLE, reads=consecutive)


def test_repetition() -> None:
    repeats, once = torch.tensor([0, 1, 2, 0, 3, 1]), {"sync::repeat_interleave": 1}
    _check(torch.repeat_interleave, repeats, reads=once)
    _check(lambda x, r: x.repeat_interleave(r, dim=0), X, repeats, reads=once)
    _check(_with_gradient(lambda x, r: x.repeat_interleave(r, dim=0)), X, repeats, reads=once)
    _check(lambda x, r: x.repeat_interleave(r, dim=0, output_size=7), X, repeats, reads={})
    _check(lambda x: x.repeat_interleave(3, dim=1), X, reads={})
    _check(torch.repeat_interleave, torch.zeros(0, dtype=torch.int64), reads=once)


def test_numbers_that_python_asks_for() -> None:
    read = {"sync::_local_scalar_dense": 1}
    _check(lambda x: x * 2 if x.sum() > 100 else x * 3, X, reads=read)
    _check(lambda x: x * (1 + torch.equal(x, x)), X, reads={"sync::equal": 1})
    _check(lambda x: torch.bincount(x.flatten()), WHOLE, reads={"sync::bincount": 1})
    _check(lambda x: torch.histc(x, 5), X, reads={})
    _check(lambda x, mask: torch.where(mask, x, 0), X, MASK, reads={})


def test_other_numbers_of_elements_compile_only_what_follows() -> None:
    """The search itself is the same program for all numbers."""
    x = X.to("xla")
    x[x > 0].sum().item()
    for bound in (1, 2):
        counters.reset()
        x[x > bound].sum().item()
        assert counters.value("UncachedCompile") <= 2
        assert counters.value("Execute") == 2
        counters.reset()
        x[x > bound].sum().item()
        assert counters.value("UncachedCompile") == 0
        assert counters.value("TransferFromDevice") == 2


WRONG: dict[str, tuple[Call, tuple[torch.Tensor, ...]]] = {
    "a mask of another shape": (_index, (X, torch.ones(5, dtype=torch.bool))),
    "a mask of too many dims": (_index, (X, torch.ones(6, 4, 2, dtype=torch.bool))),
    "writing by a mask of another shape": (_put, (X, torch.ones(5, dtype=torch.bool), torch.tensor(0.0))),
    "values of another shape": (_put, (X, ROWS, torch.zeros(3))),
    "too many dims of values": (_put, (X, ROWS, torch.zeros(2, 1, 4))),
    "another number of values": (_put, (X, MASK, torch.zeros(2))),
    "no values": (_put, (X, MASK, torch.zeros(0))),
    "negative repetition": (torch.repeat_interleave, (torch.tensor([1, -2, 3]),)),
    "repetition by floats": (torch.repeat_interleave, (torch.tensor([1.0]),)),
    "repetition of many dims": (torch.repeat_interleave, (torch.ones(2, 2, dtype=torch.int64),)),
    "a mask of whole numbers": (torch.masked_select, (X, MASK.int())),
    "unique rows of nothing": (lambda x: torch.unique(x, dim=0), (torch.zeros(3, 0),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, inputs = WRONG[name]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        _on("cpu", call, inputs)
    with pytest.raises(expected.type, match="|".join(str(expected.value).replace("[", "").split()[:2])):
        _on("xla", call, inputs).cpu()
