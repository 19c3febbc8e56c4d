"""`torch.compile(backend="openxla")` gives eager PyTorch's results, from programs whose Python is not run again."""

import copy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.backend import counters

CALLS: list[str] = []


class Network(nn.Module):
    """(N, 3, 8, 8) to (N, 4); says when its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.compiler.is_compiling() or CALLS.append("forward")
        return self.linear(F.relu(self.norm(self.convolution(x))).flatten(1))


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    CALLS.clear()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Network()
    return model, copy.deepcopy(model).to("xla")


def batch(index: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def test_training_like_eager() -> None:
    eager, model = pair()
    compiled = torch.compile(model, backend="openxla")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, model)]
    for index in range(6):
        x, y = batch(index)
        before = counters.snapshot()
        losses = [F.cross_entropy(eager(x), y), F.cross_entropy(compiled(x.to("xla")), y.to("xla"))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        xla.sync()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    after = counters.snapshot()
    assert after["Replay"] - before["Replay"] == 2  # the forward and the backward graph
    # forward; the loss and the running statistics; backward; update
    assert after["Execute"] - before["Execute"] == 4
    assert after["UncachedCompile"] == before["UncachedCompile"]
    for expected, actual in zip(eager.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)
    assert CALLS == ["forward"] * 6  # all of them eager's


def test_inference_runs_one_program() -> None:
    eager, model = pair()
    eager.eval()
    compiled = torch.compile(model.eval(), backend="openxla")
    with torch.no_grad():
        for index in range(5):
            x = batch(index)[0]
            before = counters.snapshot()
            torch.testing.assert_close(compiled(x.to("xla")).cpu(), eager(x))
    after = counters.snapshot()
    assert after["Execute"] - before["Execute"] == 1
    assert after["Replay"] - before["Replay"] == 1


def test_a_graph_break_and_sizes_that_change() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin() * x.shape[0]
        torch._dynamo.graph_break()
        return y.sum(1) + 1

    compiled = torch.compile(function, backend="openxla", dynamic=True)
    for rows in (2, 3, 4, 3, 2):
        x = torch.arange(rows * 3.0).reshape(rows, 3)
        torch.testing.assert_close(compiled(x.to("xla")).cpu(), function(x))


def test_results_that_share_memory() -> None:
    """Views of a parameter, of an argument and of one another, and an argument that is written to."""

    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        x.add_(1)
        y = x * 2
        return weight.t(), x[1:], y, y.view(-1)

    compiled = torch.compile(function, backend="openxla")
    weight, x = torch.randn(2, 3), torch.zeros(3, 2)
    on_device = weight.to("xla"), x.to("xla")
    for _ in range(5):
        expected, actual = function(weight, x), compiled(*on_device)
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other.cpu(), one)
            assert other.stride() == one.stride()
    torch.testing.assert_close(on_device[1].cpu(), x)
    actual[2].zero_()
    assert actual[3].cpu().count_nonzero() == 0


def test_views_where_the_device_has_other_strides_than_the_graph() -> None:
    """Results of the device are contiguous; the CPU keeps a transposed input's order, and the graph counts on it."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.t().exp()  # strides (1, 3) on the CPU
        return y, y.t().view(-1), y.t(), y.as_strided((6,), (1,))

    compiled = torch.compile(function, backend="openxla")
    for index in range(5):
        x = torch.arange(6.0).reshape(2, 3) + index
        for expected, actual in zip(function(x), compiled(x.to("xla")), strict=True):
            torch.testing.assert_close(actual.cpu(), expected)
            assert actual.stride() == expected.stride()


def test_attention_with_its_gradient() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(2, 5, 32).tanh()

    compiled = torch.compile(function, backend="openxla")
    for index in range(4):
        torch.manual_seed(index)
        expected = [torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3)]
        actual = [tensor.detach().to("xla").requires_grad_() for tensor in expected]
        function(*expected).square().sum().backward()
        compiled(*actual).square().sum().backward()
        for one, other in zip(expected, actual, strict=True):
            assert other.grad is not None
            torch.testing.assert_close(other.grad.cpu(), one.grad)


def test_dropout_draws_anew_and_its_gradient_uses_the_mask() -> None:
    @torch.compile(backend="openxla")
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    seen = []
    for _ in range(5):
        x = torch.ones(64, device="xla", requires_grad=True)
        y = function(x)
        y.sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), y.detach().cpu())
        seen.append(tuple(y.tolist()))
    assert len(set(seen)) == 5


def test_tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"is on cpu; move it.*\.to\(\"xla\"\)"):
        torch.compile(lambda x: x + 1, backend="openxla")(torch.ones(3))


def test_options_are_refused() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no options, got .*'fast'"):
        torch.compile(lambda x: x + 1, backend="openxla", options={"fast": True})(torch.ones(3, device="xla"))


PROGRAM = """
import torch
{first}
import sys, xlatrainer
assert ("torch._dynamo" in sys.modules) == {loaded}
print(torch.compile(lambda x: x * 2, backend="openxla")(torch.ones(2, device="xla")).tolist())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("early", [False, True], ids=["torch looks for backends later", "it has looked before"])
def test_it_is_found_without_loading_dynamo(early: bool) -> None:
    program = PROGRAM.format(first="import torch._dynamo; torch._dynamo.list_backends()" if early else "", loaded=early)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[2.0, 2.0]\n"
