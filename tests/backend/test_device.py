"""Everyday use of tensors on the device: creation, copies, reading, saving, mixing with other devices."""

import copy
import io
import pickle
import warnings

import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend import counters


def test_names_of_the_device() -> None:
    assert xla.device() == torch.device("xla:0") == torch.device("xla", 0)
    assert str(torch.randn(2, 2, device="xla").device) == "xla:0"
    assert xla.devices() == [torch.device("xla:0")]
    assert xla.device_count() == len(xla.real_devices()) >= 1
    assert torch.xla.is_available()  # type: ignore[attr-defined]
    for call in (
        lambda: xla.device(1),
        lambda: torch.zeros(2, device="xla:1"),
        lambda: torch.arange(3, device="xla:1"),
    ):
        with pytest.raises(IndexError, match="one torch device, xla:0"):
            call()


def test_tensors_are_plain() -> None:
    tensor = torch.ones(2, device="xla")
    assert type(tensor) is torch.Tensor
    assert tensor.is_xla
    assert not torch.ones(2).is_xla
    assert tensor.type() == "torch.xla.FloatTensor"
    assert type(torch.nn.Parameter(tensor)) is torch.nn.Parameter


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = (torch.randn(shape) * 10).to(dtype)
    back = source.to("xla").cpu()
    assert back.dtype is dtype
    torch.testing.assert_close(back, source, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.complex64])
def test_round_trip_of_rarer_dtypes(dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 2, 200]).to(dtype)
    assert torch.equal(source.to("xla").cpu(), source)


def test_64_bit_values_are_kept() -> None:
    assert (torch.tensor([2**53 + 1, -(2**62)], device="xla") + 1).tolist() == [2**53 + 2, -(2**62) + 1]
    assert (torch.tensor(1.0, dtype=torch.float64, device="xla") + 1e-12).item() == 1.0 + 1e-12


FACTORIES = {
    "zeros": lambda device: torch.zeros(2, 3, device=device),
    "ones": lambda device: torch.ones(2, 3, dtype=torch.int32, device=device),
    "full": lambda device: torch.full((2,), 7.5, device=device),
    "arange": lambda device: torch.arange(1, 10, 2, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 5, device=device),
    "eye": lambda device: torch.eye(3, device=device),
    "tensor": lambda device: torch.tensor([[1, 2], [3, 4]], device=device),
    "as_tensor": lambda device: torch.as_tensor([1.0, 2.0], device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2, device=device)),
    "full_like": lambda device: torch.full_like(torch.ones(2, device=device), 3),
    "new_zeros": lambda device: torch.ones(2, device=device).new_zeros(3),
    "new_tensor": lambda device: torch.ones(2, device=device).new_tensor([1, 2]),
    "scalar": lambda device: torch.tensor(5, device=device),
}


@pytest.mark.parametrize("name", sorted(FACTORIES))
def test_factories(name: str) -> None:
    result, expected = FACTORIES[name]("xla"), FACTORIES[name]("cpu")
    assert result.device == xla.device()
    torch.testing.assert_close(result.cpu(), expected)


def test_random_factories_have_their_distribution() -> None:
    torch.manual_seed(0)
    normal = torch.randn(20000, device="xla").cpu()
    assert abs(normal.mean().item()) < 0.03
    assert abs(normal.std().item() - 1) < 0.03
    uniform = torch.rand(20000, device="xla").cpu()
    assert 0 <= uniform.min().item() <= uniform.max().item() < 1
    assert abs(uniform.mean().item() - 0.5) < 0.02
    numbers = torch.randint(3, 9, (5000,), device="xla").cpu()
    assert sorted(set(numbers.tolist())) == [3, 4, 5, 6, 7, 8]
    assert sorted(torch.randperm(50, device="xla").tolist()) == list(range(50))


def test_reading() -> None:
    tensor = torch.arange(6.0, device="xla").reshape(2, 3)
    assert tensor[1, 2].item() == 5
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bool((tensor.sum() > 0).all())
    assert [row.tolist() for row in tensor] == [[0, 1, 2], [3, 4, 5]]
    assert len(tensor) == 2
    assert int(tensor[0, 1]) == 1
    assert f"{tensor[0, 2]:.1f}" == "2.0"
    assert tensor.cpu().numpy().shape == (2, 3)
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        tensor.numpy()


def test_printing_runs_nothing_twice() -> None:
    tensor = torch.tensor([1.0, 2.5], device="xla") * 2
    assert str(tensor) == "tensor([2., 5.], device='xla:0')"
    assert "requires_grad=True" in repr(torch.nn.Parameter(tensor))
    before = counters.value("UncachedCompile")
    assert str(tensor) == "tensor([2., 5.], device='xla:0')"
    assert counters.value("UncachedCompile") == before


def test_indexing_as_on_the_cpu() -> None:
    source = torch.arange(24.0).reshape(4, 6)
    on_xla = source.to("xla")
    for index in (
        0,
        -1,
        slice(1, 3),
        (slice(None), 2),
        (..., -1),
        [0, 2],
        ([0, 2], [1, 1]),
        None,
        torch.tensor([3, 0]),
    ):
        torch.testing.assert_close(on_xla[index].cpu(), source[index])
    source[1:3, ::2] = 7
    on_xla[1:3, ::2] = 7
    source[[0, 3], [1, 2]] = -1
    on_xla[[0, 3], [1, 2]] = -1
    torch.testing.assert_close(on_xla.cpu(), source)


def test_boolean_masks_as_on_the_cpu() -> None:
    source = torch.arange(6.0).reshape(2, 3)
    on_xla = source.to("xla")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the size of the result is data: it is found on the CPU
        torch.testing.assert_close(on_xla[on_xla > 2].cpu(), source[source > 2])
        on_xla[on_xla > 3] = 0
    source[source > 3] = 0
    torch.testing.assert_close(on_xla.cpu(), source)


def test_copies_are_independent() -> None:
    tensor = torch.zeros(3, device="xla")
    for make in (copy.deepcopy, copy.copy, torch.clone, lambda t: pickle.loads(pickle.dumps(t))):
        other = make(tensor)
        assert other.device == tensor.device
        other[0] = 9
        assert tensor.tolist() == [0, 0, 0]
    host = torch.ones(3)
    moved = host.to("xla")
    host[0] = 5  # the device has a copy of its own
    assert moved.tolist() == [1, 1, 1]
    back = moved.cpu()
    moved.add_(1)
    assert back.tolist() == [1, 1, 1]


def test_deepcopy_keeps_ties() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = torch.nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model = Tied().to("xla")
    model.b.weight = model.a.weight  # torch makes new parameters of a model that changes its kind of device
    twin = copy.deepcopy(model)
    assert twin.a.weight is twin.b.weight
    assert twin.a.weight is not model.a.weight


def test_save_and_load() -> None:
    content = {"t": torch.arange(4.0, device="xla"), "p": torch.nn.Parameter(torch.ones(2, device="xla"))}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert loaded["t"].device == xla.device()
    assert loaded["t"].tolist() == [0, 1, 2, 3]
    assert isinstance(loaded["p"], torch.nn.Parameter)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu")["t"].device.type == "cpu"


def test_torchs_own_switch_keeps_parameters_and_ties_when_a_model_moves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    parameters = list(model.parameters())
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("xla")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert model[0].weight is model[1].weight
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.is_xla for p in parameters)


def test_a_model_moves_and_loads_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("xla")
    assert all(p.is_xla and p.is_leaf for p in model.parameters())
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert value.is_xla
        torch.testing.assert_close(value.cpu(), state[name])


def test_mixing_devices_is_an_error_that_names_the_argument() -> None:
    tensor = torch.ones(3, device="xla")
    with pytest.raises(
        RuntimeError, match=r"not an XLA tensor: torch.FloatTensor.*argument 'other' of aten::add.Tensor"
    ):
        tensor + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"argument 'self' of aten::add.Tensor is on cpu"):
        torch.ones(3) + tensor
    with pytest.raises(RuntimeError, match="not an XLA tensor: torch.FloatTensor"):
        torch.nn.Linear(3, 2)(tensor)
    with pytest.raises(RuntimeError, match=r"argument 'target'.*cpu"):
        torch.nn.functional.nll_loss(torch.ones(2, 3, device="xla"), torch.tensor([0, 1]))


def test_scalars_of_the_cpu_may_take_part() -> None:
    tensor = torch.ones(3, device="xla")
    assert (tensor + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert (torch.tensor(2.0) * tensor).tolist() == [2, 2, 2]
    assert (torch.ones(2, dtype=torch.int32, device="xla") * torch.tensor(2.5)).dtype is torch.float32
    tensor.fill_(torch.tensor(4.0))
    assert tensor.tolist() == [4, 4, 4]


def test_type_promotion_is_torchs() -> None:
    operands = [torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.int32), torch.ones(2).half(), torch.ones(2)]
    operands += [torch.tensor(1), torch.tensor(1.0, dtype=torch.float64), torch.ones(2, dtype=torch.bool)]
    numbers = [2, 2.5, True]
    for left in operands:
        for right in [*operands, *numbers]:
            other = right.to("xla") if isinstance(right, torch.Tensor) else right
            assert (left.to("xla") * other).dtype is (left * right).dtype
            torch.testing.assert_close((left.to("xla") * other).cpu(), left * right)
    assert torch.cos(torch.tensor(100, device="xla")).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.cos(torch.tensor(100, device="xla")).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_out_arguments() -> None:
    source = torch.tensor([1.0, 4.0], device="xla")
    out = torch.empty(0, device="xla")
    assert torch.sqrt(source, out=out) is out
    assert out.tolist() == [1, 2]
    double = torch.zeros(2, dtype=torch.float64, device="xla")
    torch.add(source, source, out=double)
    assert double.tolist() == [2, 8]
    with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Long"):
        torch.add(source, source, out=torch.empty(2, dtype=torch.int64, device="xla"))
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(source, source, out=torch.empty(3, device="xla"))


def test_wrong_arguments_fail_at_the_call_as_on_the_cpu() -> None:
    for device in ("cpu", "xla"):
        matrix = torch.ones(2, 3, device=device)
        for wrong in (lambda m: m @ m, lambda m: m + torch.ones(4, device=m.device), lambda m: m.sum(5)):
            with pytest.raises((RuntimeError, IndexError)) as caught:
                wrong(matrix)
            assert type(caught.value) in (RuntimeError, IndexError)
        with pytest.raises(IndexError, match="Dimension out of range"):
            matrix.sum(5)
        with pytest.raises(RuntimeError):  # "can't be cast", on the CPU and in torch's meta kernels in other words
            torch.ones(2, dtype=torch.int64, device=device).add_(1.5)
