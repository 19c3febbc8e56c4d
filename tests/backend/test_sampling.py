"""Every generator of random numbers draws from the distribution that CPU torch draws from."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions

from xlatrainer.backend import counters

NUM = 20_000
# The Kolmogorov-Smirnov statistic, scaled, passes this with probability 0.001 in equal distributions; seeds are fixed.
LIMIT = 1.95

Sampler = Callable[[torch.device], torch.Tensor]


def kolmogorov_smirnov(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest distance between the empirical distribution functions of two samples, times the scale of its law."""
    first, second = (sample.double().flatten().sort().values for sample in (first, second))
    places = torch.cat([first, second])
    shares = [torch.searchsorted(sample, places, right=True) / len(sample) for sample in (first, second)]
    scale = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    return float((shares[0] - shares[1]).abs().max()) * scale


def _full(device: Any, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((NUM,), value, dtype=dtype, device=device)


def _into(method: str, *args: Any, dtype: torch.dtype = torch.float32) -> Sampler:
    """Fills a tensor in place."""
    return lambda device: getattr(torch.empty(NUM, dtype=dtype, device=device), method)(*args)


SAMPLERS: dict[str, Sampler] = {
    "uniform": _into("uniform_", -2.0, 5.0),
    "normal": _into("normal_", 1.0, 3.0),
    "exponential": _into("exponential_", 0.7),
    "cauchy": _into("cauchy_", 1.0, 2.0),
    "log_normal": _into("log_normal_", 0.5, 1.2),
    "geometric": _into("geometric_", 0.15),
    "geometric of whole numbers": _into("geometric_", 0.001, dtype=torch.int64),
    "bernoulli": _into("bernoulli_", 0.3),
    "random": _into("random_"),
    "random below": _into("random_", 37, dtype=torch.int64),
    "random between": _into("random_", -5, 11, dtype=torch.int16),
    "random from": _into("random_", 2**30, None, dtype=torch.int32),
    "random of float16": _into("random_", dtype=torch.float16),
    "randint of a wide range": lambda device: torch.randint(-(2**62), 2**62, (NUM,), device=device),
    "bernoulli of a tensor": lambda device: torch.bernoulli(torch.linspace(0, 1, NUM, device=device)),
    "normal of tensors": lambda device: torch.normal(
        torch.linspace(-3, 3, NUM, device=device), torch.linspace(0, 2, NUM, device=device)
    ),
    **{f"poisson {rate}": lambda device, r=rate: torch.poisson(_full(device, r)) for rate in (0.4, 9.9, 10, 250, 1e6)},
    "poisson of float64": lambda device: torch.poisson(_full(device, 1e12, torch.float64)),
    **{
        f"binomial {count} {chance}": lambda device, n=count, p=chance: torch.binomial(
            _full(device, n), _full(device, p)
        )
        for count, chance in ((10, 0.3), (10, 0.9), (100, 0.5), (1000, 0.004), (1e6, 0.7))
    },
    **{f"gamma {a}": lambda device, a=a: torch._standard_gamma(_full(device, a)) for a in (0.1, 0.7, 1, 5, 3e4)},
    "gamma of float64": lambda device: torch._standard_gamma(_full(device, 2.5, torch.float64)),
    "dirichlet": lambda device: torch._sample_dirichlet(
        torch.tensor([0.3, 1.0, 4.0], device=device).expand(NUM, 3)
    ).reshape(-1, 3)[:, 0],
    "dirichlet of small numbers": lambda device: torch._sample_dirichlet(
        torch.tensor([0.02, 0.03], device=device).expand(NUM, 2)
    )[:, 1],
    "multinomial": lambda device: torch.multinomial(torch.tensor([1.0, 0, 4, 2, 3], device=device), NUM, True),
    "multinomial of rows": lambda device: torch.multinomial(
        torch.tensor([1.0, 0, 4, 2, 3], device=device).expand(NUM, 5), 3
    )[:, 2],
    "randn of complex numbers": lambda device: torch.randn(NUM, dtype=torch.complex64, device=device).imag,
    "rand of complex numbers": lambda device: torch.rand(NUM, dtype=torch.complex64, device=device).real,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_distribution(name: str) -> None:
    counters.reset()
    drawn = SAMPLERS[name](torch.device("xla"))
    assert not [counter for counter in counters.snapshot() if "::" in counter]
    expected = SAMPLERS[name](torch.device("cpu"))
    assert drawn.dtype is expected.dtype
    assert kolmogorov_smirnov(drawn.cpu(), expected) < LIMIT


def test_the_statistic_tells_distributions_apart() -> None:
    assert kolmogorov_smirnov(torch.randn(NUM), torch.randn(NUM)) < LIMIT
    assert kolmogorov_smirnov(torch.randn(NUM), torch.randn(NUM) * 1.1) > LIMIT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["uniform_", "normal_", "exponential_", "log_normal_"])
def test_other_dtypes(method: str, dtype: torch.dtype) -> None:
    drawn, expected = (_into(method, dtype=dtype)(torch.device(device)) for device in ("xla", "cpu"))
    assert drawn.dtype is dtype
    if dtype is not torch.float64:  # samples of few digits share their values: spread them over what was rounded
        drawn, expected = (
            sample.cpu().float() * (1 + (torch.rand(NUM) - 0.5) * torch.finfo(dtype).eps)
            for sample in (drawn, expected)
        )
    assert kolmogorov_smirnov(drawn.cpu(), expected) < LIMIT * 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_excluded_bounds(dtype: torch.dtype) -> None:
    unit = torch.rand(500_000, dtype=dtype, device="xla")
    assert 0 <= unit.min().item() < 0.01
    assert 0.99 < unit.max().item() < 1
    shifted = torch.empty(100_000, dtype=dtype, device="xla").uniform_(3, 5)
    assert shifted.min().item() >= 3
    assert shifted.max().item() < 5
    assert torch.empty(500_000, dtype=dtype, device="xla").exponential_().min().item() > 0
    assert torch.empty(1000, dtype=dtype, device="xla").geometric_(0.999).min().item() == 1


def test_every_number_of_a_range_is_as_likely() -> None:
    counts = torch.bincount(torch.randint(0, 7, (70_000,), device="xla")).cpu()
    chi_squared = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi_squared < 22.5  # 6 degrees of freedom, probability 0.001
    assert torch.randint(2**40, 2**40 + 1, (3,), device="xla").tolist() == [2**40] * 3
    assert torch.empty(2000, dtype=torch.bool, device="xla").random_().float().mean().item() == pytest.approx(
        0.5, abs=0.05
    )
    assert torch.empty(9, dtype=torch.uint8, device="xla").random_(250, 256).min().item() >= 250


def test_permutations() -> None:
    orders = torch.stack([torch.randperm(5, device="xla").cpu() for _ in range(300)])
    assert torch.equal(orders.sort(1).values, torch.arange(5).expand(300, 5))
    first = torch.bincount(orders[:, 0], minlength=5)
    assert float(((first - 60) ** 2 / 60).sum()) < 18.5  # 4 degrees of freedom, probability 0.001
    assert len({tuple(order) for order in orders.tolist()}) > 100
    assert [torch.randperm(n, device="xla").tolist() for n in (0, 1)] == [[], [0]]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("layer", ["Dropout", "Dropout2d", "AlphaDropout", "FeatureAlphaDropout"])
def test_keep_rates(layer: str, p: float) -> None:
    ones = torch.ones(100, 50, 2, 2)
    dropout = getattr(torch.nn, layer)(p)
    dropped, expected = dropout(ones.to("xla")).cpu(), dropout(ones)
    shares = [(x == x.flatten()[x.argmax()]).double().mean().item() for x in (dropped, expected)]
    assert shares[0] == pytest.approx(shares[1], abs=0.03)
    if "2d" in layer or "Feature" in layer:
        assert torch.equal(dropped, dropped[:, :, :1, :1].expand_as(dropped))


def test_a_changing_rate_compiles_nothing() -> None:
    def kept(p: float) -> float:
        x = torch.ones(1000, device="xla", requires_grad=True)
        torch.nn.functional.dropout(x, p).sum().backward()
        assert x.grad is not None
        return (x.grad > 0).float().mean().item() - torch.empty(1000, device="xla").bernoulli_(p).mean().item()

    rates = [kept(0.4)]  # not the 0.5 that operators take when told nothing
    counters.reset()
    rates += [kept(p) for p in (0.1, 0.9)]
    assert counters.value("UncachedCompile") == 0
    assert rates == pytest.approx([0.2, 0.8, -0.8], abs=0.1)


def test_samples_without_replacement_are_different() -> None:
    weights = torch.rand(30, 8, device="xla")
    drawn = torch.multinomial(weights, 8).cpu()
    assert torch.equal(drawn.sort(1).values, torch.arange(8).expand(30, 8))
    assert torch.multinomial(torch.eye(4, device="xla"), 1)[:, 0].tolist() == [0, 1, 2, 3]
    assert torch.multinomial(torch.eye(4, device="xla"), 50, True).cpu().unique(dim=1)[:, 0].tolist() == [0, 1, 2, 3]


WRONG: dict[str, Callable[[Any], torch.Tensor]] = {
    "negative weights": lambda device: torch.multinomial(torch.tensor([1.0, -1.0], device=device), 1),
    "no weights": lambda device: torch.multinomial(torch.zeros(3, device=device), 1),
    "NaN": lambda device: torch.multinomial(torch.tensor([1.0, math.nan], device=device), 1),
    "bernoulli above 1": lambda device: torch.bernoulli(torch.tensor([0.5, 1.5], device=device)),
    "negative rates": lambda device: torch.poisson(torch.tensor([1.0, -1.0], device=device)),
    "negative deviations": lambda device: torch.normal(torch.zeros(2, device=device), -torch.ones(2, device=device)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_are_told_when_something_is_read(name: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        WRONG[name]("cpu")
    with pytest.raises(RuntimeError) as raised:
        WRONG[name]("xla").cpu()
    assert str(raised.value).startswith(str(expected.value).split("\n")[0][:25])


def test_gradients_of_samples() -> None:
    """torch's gradient of a Dirichlet sample is an approximation, good to a few thousandths."""
    alpha = torch.rand(500) * 10 + 0.05
    samples = torch._standard_gamma(alpha)
    actual = torch._standard_gamma_grad(alpha.to("xla"), samples.to("xla")).cpu()
    torch.testing.assert_close(actual, torch._standard_gamma_grad(alpha, samples), rtol=2e-3, atol=2e-3)
    for scale in (0.1, 3, 1000):
        alpha = torch.rand(300, 4, dtype=torch.float64) * scale + 0.01 * scale
        samples = torch._sample_dirichlet(alpha)
        total = alpha.sum(-1, keepdim=True).expand_as(alpha).contiguous()
        actual = torch._dirichlet_grad(*(x.to("xla") for x in (samples, alpha, total))).cpu()
        torch.testing.assert_close(actual, torch._dirichlet_grad(samples, alpha, total), rtol=5e-3, atol=5e-2 / scale)


DISTRIBUTIONS: dict[str, Callable[[Callable[[float], torch.Tensor]], distributions.Distribution]] = {
    "Normal": lambda p: distributions.Normal(p(1.0), p(2.0)),
    "Gamma": lambda p: distributions.Gamma(p(2.0), p(3.0)),
    "Beta": lambda p: distributions.Beta(p(0.5), p(2.0)),
    "Dirichlet": lambda p: distributions.Dirichlet(torch.stack([p(0.5), p(2.0), p(1.0)])),
    "Categorical": lambda p: distributions.Categorical(torch.stack([p(0.5), p(2.0), p(1.0)])),
    "Multinomial": lambda p: distributions.Multinomial(20, torch.stack([p(0.5), p(2.0), p(1.0)])),
    "Poisson": lambda p: distributions.Poisson(p(4.0)),
    "StudentT": lambda p: distributions.StudentT(p(3.0), p(1.0), p(2.0)),
    "Binomial": lambda p: distributions.Binomial(30, p(0.3)),
    "NegativeBinomial": lambda p: distributions.NegativeBinomial(p(5.0), p(0.3)),
    "Laplace": lambda p: distributions.Laplace(p(1.0), p(2.0)),
    "Cauchy": lambda p: distributions.Cauchy(p(1.0), p(2.0)),
    "Exponential": lambda p: distributions.Exponential(p(2.0)),
    "Geometric": lambda p: distributions.Geometric(p(0.3)),
    "Gumbel": lambda p: distributions.Gumbel(p(1.0), p(2.0)),
    "LogNormal": lambda p: distributions.LogNormal(p(0.1), p(0.5)),
    "Weibull": lambda p: distributions.Weibull(p(1.0), p(2.0)),
    "Chi2": lambda p: distributions.Chi2(p(3.0)),
    "VonMises": lambda p: distributions.VonMises(p(0.5), p(2.0)),
    "RelaxedBernoulli": lambda p: distributions.RelaxedBernoulli(p(0.5), p(0.3)),
    "MultivariateNormal": lambda p: distributions.MultivariateNormal(
        torch.stack([p(1.0), p(2.0)]), torch.diag_embed(torch.stack([p(1.0), p(3.0)]))
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_torch_distributions(name: str) -> None:
    samples = []
    for device in ("xla", "cpu"):
        distribution = DISTRIBUTIONS[name](lambda value, d=device: torch.tensor(value, device=d))
        drawn = distribution.sample((4000,))
        assert drawn.device.type == device
        samples.append(drawn.cpu())
    for first, second in zip(*(sample.view(4000, -1).T for sample in samples), strict=True):
        assert kolmogorov_smirnov(first, second) < LIMIT


def test_reparametrized_samples_have_gradients() -> None:
    torch.manual_seed(3)
    alpha = torch.tensor([2.0], device="xla", requires_grad=True)
    distributions.Gamma(alpha, torch.ones(1, device="xla")).rsample((20_000,)).mean().backward()
    assert alpha.grad is not None
    assert alpha.grad.item() == pytest.approx(1, abs=0.05)  # the mean of Gamma(alpha) is alpha
    beta = torch.tensor([2.0], device="xla", requires_grad=True)
    distributions.Beta(beta, torch.full((1,), 3.0, device="xla")).rsample((20_000,)).mean().backward()
    assert beta.grad is not None
    assert beta.grad.item() == pytest.approx(3 / 25, abs=0.01)  # of beta / (beta + 3)
