"""Calls that are wrong for the data or the numbers they are made with: xla fails as the CPU does.

Where data decides, the CPU raises at the call and xla when something is read; the type is the same, and the device goes
on. Where a number of the call decides, both raise at the call, also when the same call was recorded with a number that
is right.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import xlatrainer as xla

pytestmark = pytest.mark.filterwarnings("ignore")

Call = Callable[[str], object]


def _on(device: str, *values: object) -> torch.Tensor:
    return torch.tensor(values).to(device)


def _zeros(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (3, 3), dtype=dtype, device=device)


def _nans(device: str) -> torch.Tensor:
    return torch.full((3, 3), float("nan"), device=device)


def _rows(device: str) -> torch.Tensor:
    return torch.arange(20.0).reshape(4, 5).to(device)


DATA: dict[str, Call] = {
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(3).to(d)),
    "cholesky_ex": lambda d: torch.linalg.cholesky_ex(-torch.eye(3).to(d), check_errors=True),
    "inv": lambda d: torch.linalg.inv(_zeros(d)),
    "inv_ex": lambda d: torch.linalg.inv_ex(_zeros(d), check_errors=True),
    "solve": lambda d: torch.linalg.solve(_zeros(d), _zeros(d)),
    "solve_ex": lambda d: torch.linalg.solve_ex(_zeros(d), _zeros(d), check_errors=True),
    "lu_factor": lambda d: torch.linalg.lu_factor(_zeros(d)),
    "lu_factor_ex": lambda d: torch.linalg.lu_factor_ex(_zeros(d), check_errors=True),
    "matrix_power": lambda d: torch.linalg.matrix_power(_zeros(d), -1),
    "tensorinv": lambda d: torch.linalg.tensorinv(_zeros(d, 4, 2, 2), 1),
    "eigh": lambda d: torch.linalg.eigh(_nans(d)),
    "eigvalsh": lambda d: torch.linalg.eigvalsh(_nans(d)),
    "svd": lambda d: torch.linalg.svd(_nans(d)),
    "svdvals": lambda d: torch.linalg.svdvals(_nans(d)),
    "pinv": lambda d: torch.linalg.pinv(_nans(d)),
    "eig": lambda d: torch.linalg.eig(_nans(d)),
    "lu_unpack": lambda d: torch.lu_unpack(_zeros(d), _zeros(d, 3, dtype=torch.int32)),
    "_assert_async": lambda d: torch._assert_async(_on(d, False)[0]),
    "binary_cross_entropy": lambda d: functional.binary_cross_entropy(_on(d, 2.0, 0.5), _on(d, 1.0, 0.0)),
    "nll_loss": lambda d: functional.nll_loss(_rows(d), _on(d, 0, 1, 2, 7)),
    "cross_entropy": lambda d: functional.cross_entropy(_rows(d), _on(d, 0, 1, 2, -1)),
    "multi_margin_loss": lambda d: functional.multi_margin_loss(_rows(d), _on(d, 0, 1, 2, 9)),
    "multilabel_margin_loss": lambda d: functional.multilabel_margin_loss(_rows(d), torch.full((4, 5), 9).to(d)),
    "one_hot": lambda d: functional.one_hot(_on(d, -1, 2)),
    "one_hot, classes": lambda d: functional.one_hot(_on(d, 1, 7), 3),
    "bincount": lambda d: torch.bincount(_on(d, 1, -1)),
    "embedding_bag, index": lambda d: functional.embedding_bag(_on(d, [1, 9]), _rows(d)),
    "embedding_bag, offsets": lambda d: functional.embedding_bag(_on(d, 1, 2), _rows(d), _on(d, 1, 1)),
    "put": lambda d: _rows(d).put(_on(d, 99), _on(d, 1.0)),
    "index_reduce": lambda d: _rows(d).index_reduce(0, _on(d, 9), _rows(d)[:1], "amax"),
    "scatter_reduce": lambda d: _rows(d).scatter_reduce(0, _on(d, [9]), _rows(d)[:1, :1], "amax"),
    "max_unpool2d": lambda d: functional.max_unpool2d(_zeros(d, 1, 1, 2, 2), torch.full((1, 1, 2, 2), 99).to(d), 2),
    "searchsorted": lambda d: torch.searchsorted(_on(d, 1.0, 2.0), _on(d, 1.0), sorter=_on(d, 5, 7)),
    "segment_reduce": lambda d: torch.segment_reduce(_on(d, 1.0, 2.0), "sum", lengths=_on(d, 5)),
    "histc": lambda d: torch.histc(_on(d, 1.0, float("nan"))),
    "ctc_loss": lambda d: functional.ctc_loss(
        torch.zeros(5, 2, 4).log_softmax(2).to(d), torch.ones(2, 3, dtype=torch.long).to(d), (9, 5), (3, 3)
    ),
    "floor_divide": lambda d: _on(d, 1) // _on(d, 0),
    "remainder": lambda d: _on(d, 1) % _on(d, 0),
    "fmod": lambda d: torch.fmod(_on(d, 1), _on(d, 0)),
    "div, trunc": lambda d: torch.div(_on(d, 1), _on(d, 0), rounding_mode="trunc"),
}


def _read(result: object) -> None:
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, torch.Tensor):
            item.cpu()
    xla.sync()
    xla.wait_device_ops()


@pytest.mark.parametrize("name", sorted(DATA))
def test_wrong_data_fails_as_on_the_cpu(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as on_cpu:
        DATA[name]("cpu")
    with pytest.raises((RuntimeError, IndexError)) as on_xla:
        _read(DATA[name]("xla"))
    assert on_xla.type is on_cpu.type
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]  # the device goes on


def test_only_what_counts_is_checked() -> None:
    """-1 ends the labels of a row, -100 marks a target that is ignored, integers alone cannot be divided by zero."""
    scores = torch.rand(2, 4)
    target = torch.tensor([[0, 3, -1, 9], [-1, 0, 0, 0]]).clamp(max=3)
    expected = functional.multilabel_margin_loss(scores, target)
    found = functional.multilabel_margin_loss(scores.to("xla"), target.to("xla"))
    torch.testing.assert_close(found.cpu(), expected)
    assert (_on("xla", 1.0) // _on("xla", 0.0)).tolist() == [float("inf")]
    assert torch.linalg.cholesky_ex(-torch.eye(3).to("xla")).info.item() == 1


# What decides is a number of the call. Each is called with a number that fits first.
NUMBERS: dict[str, tuple[Callable[[str, float], object], float, float]] = {
    "fill_": (lambda d, n: _zeros(d, 2, dtype=torch.int8).fill_(n), 7, 300),
    "full": (lambda d, n: torch.full((2,), n, dtype=torch.int8, device=d), 7, -300),
    "full_like": (lambda d, n: torch.full_like(_zeros(d, 2, dtype=torch.int16), n), 7, 2**15),
    "masked_fill": (lambda d, n: _zeros(d, 2, dtype=torch.half).masked_fill(_on(d, True), n), -1e4, -1e9),
    "index_fill": (lambda d, n: _zeros(d, 2, dtype=torch.int8).index_fill(0, _on(d, 1), n), 7, 300),
    "scatter": (lambda d, n: _zeros(d, 2, dtype=torch.int8).scatter(0, _on(d, 1), n), 7, 300),
    "pad": (lambda d, n: functional.pad(_zeros(d, 2, dtype=torch.int8), (1, 1), value=n), 7.0, 300.0),
    "clamp": (lambda d, n: _zeros(d, 2, dtype=torch.int8).clamp(0, n), 7, 300),
    "where": (lambda d, n: torch.where(_on(d, True), _zeros(d, 2, dtype=torch.int8), n), 7, 300),
    "pow": (lambda d, n: _zeros(d, 2, dtype=torch.int8).pow(n), 3, 300),
    "set": (lambda d, n: _zeros(d, 2, dtype=torch.int8).__setitem__(0, n), 7, 300),
    "float": (lambda d, n: _zeros(d, 2).fill_(n), 1e30, 1e300),
}


RULES: dict[str, tuple[Callable[[str, float], object], float, float]] = {
    "bernoulli_": (lambda d, n: _zeros(d, 2).bernoulli_(n), 0.5, 2.0),
    "cauchy_": (lambda d, n: _zeros(d, 2).cauchy_(0.0, n), 1.0, -1.0),
    "exponential_": (lambda d, n: _zeros(d, 2).exponential_(n), 1.0, -1.0),
    "geometric_": (lambda d, n: _zeros(d, 2).geometric_(n), 0.5, 2.0),
    "huber_loss": (lambda d, n: functional.huber_loss(_zeros(d, 2), _zeros(d, 2), delta=n), 1.0, 0.0),
    "log_normal_": (lambda d, n: _zeros(d, 2).log_normal_(0.0, n), 1.0, -1.0),
    "normal_": (lambda d, n: _zeros(d, 2).normal_(0.0, n), 1.0, -1.0),
    "randint": (lambda d, n: torch.randint(int(n), 4, (2,), device=d), 3, 5),
    "random_": (lambda d, n: _zeros(d, 2).random_(int(n), 4), 3, 5),
    "renorm": (lambda d, n: torch.renorm(_zeros(d), 2.0, 0, n), 1.0, -1.0),
    "smooth_l1_loss": (lambda d, n: functional.smooth_l1_loss(_zeros(d, 2), _zeros(d, 2), beta=n), 1.0, -1.0),
    "softshrink": (lambda d, n: functional.softshrink(_zeros(d, 2), n), 1.0, -1.0),
    "uniform_": (lambda d, n: _zeros(d, 2).uniform_(n, 1.0), 0.0, 2.0),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_number_that_makes_no_sense_fails_at_the_call(name: str) -> None:
    call, right, wrong = RULES[name]
    with pytest.raises((RuntimeError, IndexError)) as on_cpu:
        call("cpu", wrong)
    call("xla", right)
    with pytest.raises((RuntimeError, IndexError)) as on_xla:
        call("xla", wrong)
    assert on_xla.type is on_cpu.type
    assert str(on_xla.value)[:12] == str(on_cpu.value)[:12]


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_that_does_not_fit_fails_at_the_call(name: str) -> None:
    call, right, wrong = NUMBERS[name]
    for device in ("cpu", "xla"):
        call(device, right)
        with pytest.raises(RuntimeError, match="value cannot be converted to type .* without overflow"):
            call(device, wrong)


def test_numbers_that_fit() -> None:
    for device in ("cpu", "xla"):
        assert _zeros(device, 1, dtype=torch.uint8).fill_(-1).tolist() == [255]
        assert _zeros(device, 1, dtype=torch.half).fill_(float("-inf")).tolist() == [float("-inf")]
        assert (_zeros(device, 1, dtype=torch.int8) + 300).tolist() == [44]


def test_a_copy_to_the_device_leaves_the_tensor_resizable() -> None:
    source = torch.ones(2)
    source.to("xla")
    assert source.resize_(5).shape == (5,)
