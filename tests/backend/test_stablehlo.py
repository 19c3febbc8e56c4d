"""Functions as StableHLO: as text, in a file, and back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.backend import counters


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()


def test_the_text_of_a_function_and_a_module() -> None:
    text = xla.stablehlo(
        lambda pair, times: pair["a"].exp() * times + pair["b"], {"a": torch.ones(2), "b": torch.ones(2)}, 3
    )
    assert "stablehlo.exponential" in text
    assert text.count("tensor<2xf32>") >= 3
    assert "stablehlo.tanh" in xla.stablehlo(network().to("xla"), torch.ones(3, 4))


def test_the_text_of_an_exported_program() -> None:
    exported = torch.export.export(network(), (torch.ones(3, 4),))
    assert "stablehlo.tanh" in xla.stablehlo(exported, torch.ones(3, 4))


def test_a_file_can_be_called(tmp_path: Path) -> None:
    model = network()
    x = torch.randn(3, 4)
    expected = model(x)
    xla.save_stablehlo(torch.export.export(model, (x,)), (x,), tmp_path / "model.stablehlo")
    assert [path.name for path in tmp_path.iterdir()] == ["model.stablehlo"]
    loaded = xla.load_stablehlo(tmp_path / "model.stablehlo")
    before = counters.value("UncachedCompile")
    actual = loaded(x)
    assert counters.value("UncachedCompile") == before  # none of the device's own
    assert actual.device.type == "xla"
    torch.testing.assert_close(actual.cpu(), expected.detach())
    pending = x.to("xla") * 1
    torch.testing.assert_close((loaded(pending) + 1).cpu(), expected.detach() + 1)


def test_several_results_and_dtypes(tmp_path: Path) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.argmax(1), b.double() @ b.double().t()

    a, b = torch.randn(3, 4), torch.randn(2, 5)
    xla.save_stablehlo(function, (a, b), tmp_path / "f")
    for expected, actual in zip(function(a, b), xla.load_stablehlo(tmp_path / "f")(a, b), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def test_wrong_calls(tmp_path: Path) -> None:
    xla.save_stablehlo(torch.exp, (torch.ones(2),), tmp_path / "f")
    loaded = xla.load_stablehlo(tmp_path / "f")
    with pytest.raises(ValueError, match=r"argument 0 of the program must be float32\[2\], got float32\[3\]"):
        loaded(torch.ones(3))
    with pytest.raises(TypeError, match="takes 1 tensors, got 2"):
        loaded(torch.ones(2), torch.ones(2))
    with pytest.raises(TypeError, match="takes a function, a module or an exported program, got 'f'"):
        xla.stablehlo("f")
    with pytest.raises(ValueError, match="reads values"):
        xla.stablehlo(lambda x: x * x.sum().item(), torch.ones(2))
    with pytest.raises(ValueError, match="draws random numbers"):
        xla.stablehlo(lambda x: x + torch.rand(2, device="xla"), torch.ones(2))
