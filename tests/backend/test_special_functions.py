"""Special functions at the edges of their domains, against CPU torch: poles, signed zeros, infinities, NaN, regions."""

from typing import Any

import pytest
import torch

from xlatrainer.backend import counters

_HALF_LINE = [0.0, 1e-6, 1e-3, 0.1, 0.3, 0.5, 0.7, 1, 1.3, 1.9, 2, 2.05, 2.09, 2.5, 3, 4, 5, 5.1, 7, 8.1, 9, 15, 20, 50]
_POINTS = [*_HALF_LINE, 200, 1e4, float("inf"), float("nan")]
POINTS = torch.tensor([*_POINTS, *(-x for x in _POINTS)], dtype=torch.float64)

_OF_ONE = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx i0e i1 i1e log_ndtr modified_bessel_i0 modified_bessel_i1
    modified_bessel_k0 modified_bessel_k1 ndtri scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
    """
OF_ONE = _OF_ONE.split()
OF_TWO = ["gammainc", "gammaincc", "xlog1py", "zeta"]
POLYNOMIALS = [
    *(f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"),
]
DTYPES = [torch.float32, torch.float64]


def _assert_same(function: Any, *inputs: Any, atol: float, rtol: float) -> None:
    expected = function(*inputs)
    counters.reset()
    actual = function(*(x.to("xla") if isinstance(x, torch.Tensor) else x for x in inputs)).cpu()
    assert not [name for name in counters.snapshot() if name.startswith("aten::")]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True)


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-13}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_ONE)
def test_function_of_one(name: str, dtype: torch.dtype) -> None:
    _assert_same(getattr(torch.special, name), POINTS.to(dtype), **_tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_TWO)
def test_function_of_two(name: str, dtype: torch.dtype) -> None:
    points = POINTS.to(dtype)
    _assert_same(getattr(torch.special, name), points[:, None], points, **_tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", range(4))
def test_polygamma(n: int, dtype: torch.dtype) -> None:
    points = torch.cat([POINTS, torch.linspace(-5, 5, 41, dtype=torch.float64)]).to(dtype)
    _assert_same(torch.polygamma, n, points, **_tolerance(dtype))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomial_of_every_degree_at_once(name: str) -> None:
    degrees = torch.tensor([-1, 0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 13, 40, 600])
    x = torch.cat([torch.linspace(-1.5, 1.5, 31, dtype=torch.float64), POINTS[-3:], POINTS[-30:-25]])
    _assert_same(getattr(torch.special, name), x[:, None], degrees, rtol=1e-9, atol=1e-10)
