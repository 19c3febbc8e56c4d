"""Every form of a convolution gives the same: XLA's own, the CPU's special ones, and torch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from xlatrainer.backend.lowerings import convolution, convolution_cpu, convolution_spans
from xlatrainer.backend.lowerings.convolution import Geometry
from xlatrainer.backend.runtime import compiler_options


@pytest.fixture(autouse=True, scope="module")
def _devices_are_made() -> None:
    """By the runtime, as many as the tests want, before jax makes one of its own."""
    compiler_options()


# batch, channels, output channels, spatial, kernel, geometry
CASES = {
    "one channel": (4, 1, 6, (9, 9), (5, 5), Geometry((1, 1), (0, 0), (1, 1), 1)),
    "plain": (3, 4, 6, (8, 7), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 1)),
    "pointwise": (3, 4, 6, (5, 5), (1, 1), Geometry((1, 1), (0, 0), (1, 1), 1)),
    "strided": (2, 4, 6, (9, 8), (3, 2), Geometry((2, 3), (1, 0), (1, 1), 1)),
    "dilated": (2, 3, 5, (12, 11), (3, 3), Geometry((1, 2), (2, 1), (2, 3), 1)),
    "depthwise": (2, 4, 4, (8, 8), (3, 3), Geometry((2, 2), (1, 1), (1, 1), 4)),
    "depthwise multiplied": (2, 3, 6, (8, 8), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 3)),
    "depthwise, many channels": (2, 24, 24, (9, 8), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 24)),
    "depthwise, strided": (3, 16, 16, (9, 10), (5, 3), Geometry((2, 3), (2, 0), (1, 1), 16)),
    "depthwise, dilated": (2, 16, 16, (11, 12), (3, 3), Geometry((1, 2), (2, 1), (2, 3), 16)),
    "depthwise, products left over": (2, 17, 17, (19, 1), (3, 1), Geometry((1, 1), (1, 0), (1, 1), 17)),
    "depthwise, more padding than kernel": (2, 16, 16, (3, 3), (2, 2), Geometry((1, 1), (4, 3), (1, 1), 16)),
    "depthwise, pixels unused": (2, 16, 16, (8, 8), (1, 2), Geometry((3, 5), (0, 0), (1, 1), 16)),
    "depthwise, many channels multiplied": (2, 16, 48, (6, 6), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 16)),
    "depthwise, one dim": (3, 20, 20, (33,), (7,), Geometry((2,), (3,), (1,), 20)),
    "depthwise, three dims": (2, 16, 16, (4, 3, 5), (3, 2, 3), Geometry((1, 2, 1), (1, 0, 1), (1, 1, 1), 16)),
    "depthwise, no batch": (0, 16, 16, (5, 5), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 16)),
    "grouped": (2, 4, 6, (6, 6), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 2)),
    "small image": (4, 16, 16, (2, 2), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 1)),
    "fewer positions than channels": (2, 16, 48, (3, 4), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 1)),
    "strided pointwise": (3, 4, 6, (6, 5), (1, 1), Geometry((2, 2), (0, 0), (1, 1), 1)),
    "more positions than a dot likes few": (9, 8, 4, (6, 6), (3, 3), Geometry((2, 2), (1, 1), (1, 1), 1)),
    "no batch": (0, 4, 6, (5, 5), (3, 3), Geometry((1, 1), (1, 1), (1, 1), 1)),
    "one dim": (3, 4, 5, (11,), (4,), Geometry((2,), (1,), (1,), 1)),
    "three dims": (2, 3, 4, (5, 4, 6), (2, 3, 2), Geometry((1, 2, 1), (1, 1, 0), (1, 1, 1), 1)),
}
TORCH: dict[int, Any] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def _call(function: Any, rest: tuple[Any, ...], first: Any, second: Any) -> Any:
    return function(first, second, *rest)


def calls_of(case: Any) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """The arguments of each function, with torch's result."""
    batch, channels, out_channels, spatial, kernel, geometry = case
    inputs = torch.randn(batch, channels, *spatial, requires_grad=True)
    weight = torch.randn(out_channels, channels // geometry.groups, *kernel, requires_grad=True)
    expected = TORCH[len(spatial)](inputs, weight, None, *geometry)
    grad = torch.randn_like(expected)
    grad_input, grad_weight = torch.autograd.grad(expected, (inputs, weight), grad)

    x, w, g = (jnp.asarray(t.detach().numpy()) for t in (inputs, weight, grad))
    return {
        "forward": ((x, w, geometry), expected.detach().numpy()),
        "input_gradient": ((g, w, geometry, spatial), grad_input.numpy()),
        "weight_gradient": ((x, g, geometry, kernel), grad_weight.numpy()),
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_all_forms_agree(name: str) -> None:
    forms = 0
    for function, (arguments, right) in calls_of(CASES[name]).items():
        for module in (convolution, convolution_cpu):
            first, second, *rest = arguments
            form = partial(_call, getattr(module, function), tuple(rest))
            result = jax.jit(form)(first, second)
            if result is not None:
                np.testing.assert_allclose(np.asarray(result), right, rtol=1e-4, atol=1e-4)
                forms += 1
    assert forms >= 3


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_layer_with_bias_whose_input_needs_no_gradient(name: str) -> None:
    """The first layer of a model."""
    batch, channels, out_channels, spatial, kernel, geometry = CASES[name]
    inputs, weight = (
        torch.randn(batch, channels, *spatial),
        torch.randn(out_channels, channels // geometry.groups, *kernel),
    )
    bias, results = torch.randn(out_channels), []
    for device in ("cpu", "xla"):
        own = [tensor.to(device).requires_grad_() for tensor in (weight, bias)]
        out = TORCH[len(spatial)](inputs.to(device), *own, *geometry)
        grads = torch.autograd.grad((out * out).sum(), own)
        results.append([out.detach().cpu(), *(grad.cpu() for grad in grads)])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_every_form_of_the_cpu_is_reached() -> None:
    reached = {
        (function, name)
        for name, (batch, channels, out_channels, spatial, kernel, geometry) in CASES.items()
        for function in ("forward",)
        if convolution_cpu.forward(
            jnp.ones((batch, channels, *spatial)),
            jnp.ones((out_channels, channels // geometry.groups, *kernel)),
            geometry,
        )
        is not None
    }
    assert ("forward", "one channel") in reached
    assert ("forward", "small image") in reached
    assert ("forward", "grouped") in reached


def test_the_program_of_the_cpu_has_no_convolution_where_a_dot_is_faster() -> None:
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    x, w = jnp.ones((8, 64, 2, 2)), jnp.ones((64, 64, 3, 3))
    text = jax.jit(lambda x, w: convolution._forward(x, w, geometry)).lower(x, w).as_text()
    assert "stablehlo.convolution" not in text
    assert "dot_general" in text


def test_the_places_of_windows_are_those_of_one_image_whatever_the_batch() -> None:
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)

    def every_form(x: Any, w: Any, g: Any) -> Any:
        return (
            convolution_cpu.forward(x, w, geometry),
            convolution_cpu.input_gradient(g, w, geometry, x.shape[2:]),
            convolution_cpu.weight_gradient(x, g, geometry, (3, 3)),
        )

    lengths = []
    for batch in (100, 900):
        x, w, g = jnp.ones((batch, 1, 12, 12)), jnp.ones((16, 1, 3, 3)), jnp.ones((batch, 16, 12, 12))
        text = jax.jit(every_form).lower(x, w, g).as_text()
        assert "stablehlo.convolution" not in text
        lengths.append(len(text))
    starts = 900 * 2 * 4 * 3  # where each image starts is a constant, in hexadecimal digits
    assert lengths[1] < lengths[0] + starts + 1000


@pytest.fixture(params=["images", "parts"])
def in_spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of some images, or of a part of one, whatever the shape."""
    monkeypatch.setattr(convolution_cpu, "MOST_COLUMNS", 0)
    monkeypatch.setattr(convolution_cpu, "MOST_DEPTHWISE_TAPS", 0)  # no sums over taps for one channel a group
    monkeypatch.setattr(convolution_spans, "FEW_CHANNELS", 1)
    monkeypatch.setattr(convolution_spans, "AT_ONCE", 5000 if request.param == "images" else 200)


@pytest.mark.usefixtures("in_spans")
@pytest.mark.parametrize("name", [name for name in sorted(CASES) if not name.endswith("no batch")])
def test_spans_agree(name: str) -> None:
    calls = calls_of(CASES[name])
    for function, (arguments, right) in calls.items():
        first, second, *rest = arguments
        text = jax.jit(partial(_call, getattr(convolution_cpu, function), tuple(rest))).lower(first, second).as_text()
        assert "stablehlo.while" in text or set(CASES[name][4]) == {1}
        result = jax.jit(partial(_call, getattr(convolution_cpu, function), tuple(rest)))(first, second)
        np.testing.assert_allclose(np.asarray(result), right, rtol=1e-4, atol=1e-4)


def test_folding_of_many_taps_is_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather for each of them would be slow to compile."""
    monkeypatch.setattr(convolution_spans, "MOST_UNROLLED", 8)
    monkeypatch.setattr(convolution_cpu, "MOST_COLUMNS", 0)
    (first, second, *rest), right = calls_of(CASES["strided"])["input_gradient"]
    few = jax.jit(partial(_call, convolution_cpu.input_gradient, tuple(rest))).lower(first, second).as_text()
    (first, second, *rest), right = calls_of((2, 4, 6, (9, 8), (4, 4), Geometry((2, 3), (1, 0), (1, 1), 1)))[
        "input_gradient"
    ]
    many = jax.jit(partial(_call, convolution_cpu.input_gradient, tuple(rest)))
    assert many.lower(first, second).as_text().count("stablehlo.gather") < few.count("stablehlo.gather")
    np.testing.assert_allclose(np.asarray(many(first, second)), right, rtol=1e-4, atol=1e-4)


def test_large_images_do_not_hold_all_unfolded_windows() -> None:
    """8x64x56x56 and 3x3: 58 MB of columns at once."""
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    x, w = jnp.ones((8, 64, 56, 56)), jnp.ones((64, 64, 3, 3))
    for function, first, second, rest in (
        (convolution_cpu.forward, x, w, (geometry,)),
        (convolution_cpu.input_gradient, x, w, (geometry, (56, 56))),
        (convolution_cpu.weight_gradient, x, x, (geometry, (3, 3))),
    ):
        lowered = jax.jit(partial(_call, function, rest)).lower(first, second)
        assert "stablehlo.convolution" not in lowered.as_text()
        compiled = lowered.compile(compiler_options=compiler_options())
        assert compiled.memory_analysis().temp_size_in_bytes < 32e6


def test_convolutions_with_few_channels_of_large_images_are_left_to_xla() -> None:
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)
    x, w = jnp.ones((8, 32, 64, 64)), jnp.ones((32, 32, 3, 3))
    assert convolution_cpu.forward(x, w, geometry) is None


def test_an_updated_weight_is_not_copied() -> None:
    """The new weight is written over the old one, which the gradient of the input reads."""
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)

    def update(x: Any, w: Any, g: Any) -> Any:
        grads = convolution.convolution_backward(g, x, w, None, *geometry[:3], False, [0, 0], 1, [True, True, False])
        return grads[0], w - grads[1]

    x = jnp.ones((8, 64, 4, 4))
    lowered = jax.jit(update, donate_argnums=1).lower(x, jnp.ones((64, 64, 3, 3)), x)
    program = lowered.compile(compiler_options=compiler_options()).as_text()
    entry = program[program.index("ENTRY") :]
    assert "opt-barrier" in entry
    assert not [line for line in entry.splitlines() if " copy(%w" in line]
