"""Precision policies: what tensors report, what the device holds, and that programs of two policies never mix."""

import copy
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import xlatrainer as xla
from xlatrainer.backend import dtypes, precision
from xlatrainer.backend.ir import make_spec
from xlatrainer.trainer.trainer import Trainer

FLOATS = (torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(precision._Chosen, "told", True)
    yield
    monkeypatch.undo()
    precision.refresh_policy()


def held(tensor: torch.Tensor) -> str:
    """How the graph says the tensor is held."""
    return xla.debug.graph(tensor).splitlines()[-1].partition(" : ")[2].partition("[")[0]


VARIABLES = [
    ("XLA_USE_BF16", torch.float32, "float32 as bfloat16"),
    ("XLA_USE_BF16", torch.float64, "float64 as bfloat16"),
    ("XLA_DOWNCAST_BF16", torch.float32, "float32 as bfloat16"),
    ("XLA_DOWNCAST_BF16", torch.float64, "float64 as float32"),
    ("XLA_USE_F16", torch.float32, "float32 as float16"),
    ("XLA_USE_FP16", torch.float64, "float64 as float16"),
    ("XLA_DOWNCAST_FP16", torch.float32, "float32 as float16"),
    ("XLA_DOWNCAST_FP16", torch.float64, "float64 as float32"),
    ("XLA_USE_32BIT_LONG", torch.int64, "int64 as int32"),
    ("XLA_USE_32BIT_LONG", torch.float32, "float32"),
    ("XLA_USE_BF16", torch.int64, "int64"),
    ("XLA_USE_BF16", torch.complex64, "complex64"),
]


@pytest.mark.parametrize(("variable", "dtype", "expected"), VARIABLES)
def test_a_variable(variable: str, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set after the import, as launchers do."""
    monkeypatch.setenv(variable, "1")
    tensor = torch.tensor([1, 2], dtype=dtype).to("xla")
    result = tensor + tensor
    assert held(result) == expected
    assert tensor.dtype is result.dtype is dtype
    copied = result.cpu()
    assert copied.dtype is dtype
    assert copied.tolist() == [2, 4]


def test_the_program_has_the_other_dtype() -> None:
    with xla.precision("bf16"):
        text = xla.debug.hlo(torch.ones(2, 3).to("xla") @ torch.ones(3, 4).to("xla"))
    with xla.precision("32bit-long"):
        indices = torch.arange(3).to("xla")
        integers = xla.debug.hlo(indices * indices + indices)
    assert "{(bf16[2,3]{1,0}, bf16[3,4]{1,0})->bf16[2,4]{1,0}}" in text
    assert text.count(" convert(") == 1  # of the product: the factors go into it as they are
    assert "s32[3]" in integers
    assert "s64[3]" not in integers


def test_numbers_are_rounded_on_their_way_and_come_back_as_they_were_declared() -> None:
    numbers = torch.tensor([1.001, -3.14159, 1e-8])
    with xla.precision("bf16"):
        on_xla = numbers.to("xla")
        assert torch.equal(on_xla.cpu(), numbers.bfloat16().float())
        assert on_xla[0].item() == 1.0
        assert "1.0000" in str(on_xla)


def test_the_policy_of_a_value_stays_with_it() -> None:
    before = torch.tensor([1.001]).to("xla")
    with xla.precision("bf16"):
        during = torch.tensor([1.001]).to("xla")
        mixed = before + 0.0
        assert before.item() == pytest.approx(1.001)
        assert mixed.item() == 1.0
    after = during + 0.001
    assert during.item() == 1.0
    assert held(after) == "float32"
    assert after.item() == pytest.approx(1.001)


def test_programs_of_two_policies_are_two() -> None:
    tensor = torch.tensor([1.001, 2.002])
    results = []
    for names in ((), ("bf16",), ("f16",), (), ("bf16",)):
        with xla.precision(*names):
            results.append((tensor.to("xla") * 1.001).cpu())
    assert torch.equal(results[0], results[3])
    assert torch.equal(results[1], results[4])
    assert torch.allclose(results[0], tensor * 1.001)
    assert torch.equal(results[1], (tensor.bfloat16().float() * 1.001).bfloat16().float())
    assert torch.equal(results[2], (tensor.half().float() * 1.001).half().float())


def test_longs_beyond_32_bits_are_for_the_user_to_see_to() -> None:
    large = torch.tensor([2**40 + 5, 7])
    assert large.to("xla").cpu().tolist() == [2**40 + 5, 7]
    with xla.precision("32bit-long"):
        assert large.to("xla").cpu().tolist() == [5, 7]
        indices = torch.tensor([3, 0, 0, 2]).to("xla")
        assert indices.nonzero().cpu().tolist() == [[0], [3]]
        assert torch.unique(indices).cpu().tolist() == [0, 2, 3]
        table = torch.arange(8.0).reshape(4, 2).to("xla")
        assert F.embedding(indices, table).cpu().tolist() == [[6.0, 7.0], [0.0, 1.0], [0.0, 1.0], [4.0, 5.0]]
        assert indices.argmax().dtype is torch.int64


def test_a_setter_and_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision._Chosen, "names", None)
    xla.precision("f16")
    assert held(torch.ones(2, device="xla")) == "float32 as float16"
    with xla.precision("bf16"), xla.precision("32bit-long"):
        assert held(torch.ones(2, device="xla")) == "float32"
        assert held(torch.ones(2, dtype=torch.int64, device="xla")) == "int64 as int32"
    assert held(torch.ones(2, device="xla")) == "float32 as float16"
    with pytest.raises(KeyError), xla.precision("bf16", "32bit-long"):
        raise KeyError
    assert held(torch.ones(2, device="xla")) == "float32 as float16"
    monkeypatch.setenv("XLA_USE_BF16", "1")
    xla.precision()
    assert held(torch.ones(2, device="xla")) == "float32"


def test_a_setting_starts_no_device() -> None:
    code = (
        "import torch, xlatrainer as xla\n"
        "from xlatrainer.backend import runtime\n"
        "xla.precision('bf16')\n"
        "assert not runtime.is_device_chosen()\n"
        "assert torch.tensor([1.001]).to('xla').item() == 1.0\n"
        "assert runtime.is_device_chosen()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_wrong_names_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'int8' is no precision policy; there are 'bf16', 'downcast-bf16'"):
        xla.precision("int8")
    with pytest.raises(ValueError, match="'bf16' and 'f16' do not go together: both say what torch.float32 is"):
        xla.precision("bf16", "f16")
    assert held(torch.ones(2, device="xla")) == "float32"
    xla.sync()
    monkeypatch.setenv("XLA_USE_BF16", "yes")
    with pytest.raises(ValueError, match="XLA_USE_BF16='yes': accepted are '0', '1'"):
        torch.ones(2, device="xla")


def test_the_environment_is_told_of_the_better_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    xla.sync()
    monkeypatch.setattr(precision._Chosen, "told", False)
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    with pytest.warns(UserWarning, match="asks for the precision downcast-bf16: a Trainer's precision="):
        torch.ones(2, device="xla")
    xla.sync()
    torch.zeros(2, device="xla")  # a second warning would be an error here


def test_views_are_about_the_declared_dtype() -> None:
    with xla.precision("bf16", "32bit-long"):
        numbers = torch.arange(4.0).to("xla")
        numbers.view(torch.int32)[1] = 0x40490FDB  # the bits of pi
        numbers[2:].mul_(2)
        assert numbers.cpu().tolist() == [0.0, 3.140625, 4.0, 6.0]
        assert torch.arange(3).to("xla").view(torch.int32).cpu().tolist() == [0, 0, 1, 0, 2, 0]
        made = torch.view_as_complex(torch.tensor([[1.0, 2.0]]).to("xla"))
        assert made.dtype is torch.complex64
        assert made.cpu().tolist() == [1 + 2j]
        made.real.add_(0.5)
        assert made.cpu().tolist() == [1.5 + 2j]
        assert torch.zeros(3, device="xla").resize_(5).shape == (5,)


def test_operators_that_half_types_do_not_have() -> None:
    """They compute in float32, and only what they give is rounded."""
    torch.manual_seed(0)
    square = torch.randn(4, 4)
    positive = square @ square.T + 4 * torch.eye(4)
    rounded = positive.bfloat16().float()
    with xla.precision("bf16"):
        on_xla = positive.to("xla")
        found = [torch.linalg.cholesky(on_xla), torch.linalg.eigvalsh(on_xla), torch.fft.fft(on_xla).abs()]
        found = [result.cpu() for result in found]
    expected = [torch.linalg.cholesky(rounded), torch.linalg.eigvalsh(rounded), torch.fft.fft(rounded).abs()]
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)


def _trained(model: torch.nn.Module, device: str, steps: int = 20) -> tuple[list[float], torch.nn.Module]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    inputs = torch.randn(32, 8)
    targets = (inputs[:, 0] > 0).long()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        xla.sync()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], model


@pytest.mark.parametrize("names", [("bf16",), ("downcast-bf16", "32bit-long")])
def test_training(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    expected, _ = _trained(model, "cpu")
    with xla.precision(*names):
        losses, trained = _trained(model, "xla")
        assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
        weight = trained[0].weight.detach().cpu()
    assert torch.equal(weight, weight.bfloat16().float())
    assert losses == pytest.approx(expected, abs=0.05)
    assert losses[-1] < losses[0] / 2


def test_a_replayed_step_is_of_one_policy() -> None:
    state = torch.zeros(2).to("xla")

    @xla.compile
    def step(batch: torch.Tensor) -> torch.Tensor:
        state.add_(batch)
        return state + 0.001

    def run() -> torch.Tensor:
        return step(torch.ones(2).to("xla")).cpu()

    for _ in range(4):
        result = run()
    assert step.step.reason == ""
    assert result[0].item() == pytest.approx(4.001)
    with xla.precision("bf16"):
        assert run().tolist() == [5.0, 5.0]
        assert step.step.reason
        for _ in range(4):
            result = run()
        assert result.tolist() == [9.0, 9.0]
        assert step.step.reason == ""
    assert run()[0].item() == pytest.approx(10.001)


def test_the_trainers_averages_are_not_rounded() -> None:
    """bfloat16 stops counting at 256."""
    batches = [(torch.ones(1, 1), torch.zeros(1, 1))] * 600
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    with xla.precision("bf16"):
        logs = Trainer(model, loss="mse", metrics=["mae"]).evaluate(batches, verbose=0)
    assert logs["loss"] == pytest.approx(1.0, abs=1e-6)
    assert logs["mae"] == pytest.approx(1.0, abs=1e-6)


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_platform", lambda: "tpu")
    monkeypatch.setattr(dtypes._Current, "told", set())


@pytest.mark.usefixtures("without_float64")
def test_a_platform_without_float64_says_so_once() -> None:
    numbers = torch.tensor([1 + 1e-12, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"this platform has no torch.float64: .* computed in torch.float32"):
        on_xla = numbers.to("xla")
    doubled = on_xla * 2
    assert held(doubled) == "float64 as float32"
    assert doubled.dtype is torch.float64
    assert doubled.cpu()[0].item() == 2.0  # what float64 has more is gone


@pytest.mark.usefixtures("without_float64")
def test_a_policy_that_says_what_float64_is_needs_no_warning() -> None:
    with xla.precision("downcast-bf16"):
        assert held(torch.ones(11, dtype=torch.float64).to("xla") + 1) == "float64 as float32"


def test_a_platform_with_float64_keeps_it() -> None:
    small = torch.tensor([1e-12], dtype=torch.float64).to("xla")
    assert (small + 1 - 1).item() == pytest.approx(1e-12, rel=1e-3)


def test_a_stored_program_is_of_one_policy() -> None:
    """The name of a program in the cache on disk says how everything is held."""
    plain = make_spec((2,), torch.float32)
    with xla.precision("bf16"):
        rounded = make_spec((2,), torch.float32)
    assert plain is not rounded
    assert repr(plain) != repr(rounded)


@pytest.fixture
def _matmul_precision_as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_matmul_precision_as_before")
def test_the_precision_of_float32_products_is_torchs_setting() -> None:
    """Known graphs and replayed steps follow it too."""

    def product() -> torch.Tensor:
        xla.sync()
        return torch.ones(2, 83).to("xla") @ torch.ones(83, 2).to("xla")

    step = xla.compile(lambda left, right: left @ right)
    factors = (torch.ones(3, 83).to("xla"), torch.ones(83, 3).to("xla"))
    texts = {}
    xla.counters.reset()
    for setting in ("highest", "high", "medium", "highest"):
        torch.set_float32_matmul_precision(setting)
        texts[setting] = xla.debug.hlo(product())
        assert product().sum().item() == 2 * 2 * 83
        for _ in range(3):
            step(*factors)
        assert step.step.reason == ""
    assert "operand_precision={highest,highest}" in texts["highest"]
    assert "operand_precision={high,high}" in texts["high"]
    assert "operand_precision" not in texts["medium"]
    assert xla.counters.value("UncachedCompile") == 2 * 3  # the product that is read and the step, for each setting
