"""What differs in a number or a table alone is one kernel, which XLA compiles once."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import ShapeDtypeStruct

from xlatrainer.backend.lowerings import convolution_cpu, normalization, shape
from xlatrainer.backend.lowerings.convolution import Geometry
from xlatrainer.backend.runtime import compiler_options

CHANNELS = 32


def compiled(function: Any, *shapes: tuple[int, ...]) -> str:
    """The optimized program for float32 of these shapes."""
    options = compiler_options()  # before anything else starts XLA, which is given the number of devices then
    arguments = [ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile(compiler_options=options).as_text()


def fusions(function: Any, *shapes: tuple[int, ...]) -> list[str]:
    """The bodies of the program's fused computations for float32 of these shapes, without the names of values."""
    text = compiled(function, *shapes)
    bodies = re.findall(r"^%\S*fused\S* \(.*?\) -> .*? \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    return [re.sub(r"%[\w.\-]+|, metadata=\{.*?\}", "", body) for body in bodies]


def of_channels(bodies: list[str]) -> set[str]:
    """Those that read nothing but a number a channel."""
    return {body for body in bodies if set(re.findall(r"(f32\[\S*\])\S* parameter", body)) <= {"f32[32]", "f32[]"}}


def normalized(vector: Any, *images: Any) -> list[Any]:
    """Outputs, statistics and gradients of a batch norm in training for each array of images."""
    results: list[Any] = []
    for image in images:
        out, mean, invstd, *running = normalization.native_batch_norm(
            image, vector, vector, vector, vector, True, jnp.float32(0.1), 1e-5
        )
        grads = normalization.native_batch_norm_backward(
            jnp.cos(out), image, vector, *running, mean, invstd, True, 1e-5, [True] * 3
        )
        results += [out, mean, invstd, *running, *grads]
    return results


def test_batch_norms_over_images_of_other_sizes_share_what_they_do_for_a_channel() -> None:
    vector, first, second = (CHANNELS,), (2, CHANNELS, 5, 5), (2, CHANNELS, 3, 3)
    alone = of_channels(fusions(normalized, vector, first))
    assert alone
    assert of_channels(fusions(normalized, vector, first, second)) == alone


def test_gradients_of_convolutions_take_their_places_as_one_table() -> None:
    geometry = Geometry((1, 1), (1, 1), (1, 1), 1)

    def gradient(grad: Any, weight: Any) -> Any:
        return convolution_cpu.input_gradient(grad, weight, geometry, (4, 4))

    bodies = fusions(gradient, (8, 64, 4, 4), (64, 64, 3, 3))
    (fold,) = (body for body in bodies if body.count(" gather(") == 9)
    assert fold.count(" parameter(") == 3  # the columns, the table, and where each image starts


def test_a_depthwise_convolution_has_no_kernel_for_each_tap() -> None:
    geometry, images, weight = Geometry((1, 1), (3, 3), (1, 1), CHANNELS), (4, CHANNELS, 8, 8), (CHANNELS, 1, 7, 7)
    rest = {"forward": (), "input_gradient": ((8, 8),), "weight_gradient": ((7, 7),)}
    for name, shapes in zip(rest, [(images, weight), (images, weight), (images, images)], strict=True):
        call = getattr(convolution_cpu, name)
        bodies = fusions(lambda a, b, call=call, rest=rest[name]: call(a, b, geometry, *rest), *shapes)
        assert len(bodies) <= 8, name
        assert not any(" pad(" in body and " add(" in body for body in bodies), name  # which would check bounds


def test_feature_maps_are_joined_with_channels_innermost() -> None:
    def joined(*images: Any) -> Any:
        out = shape.cat([jnp.cos(image) for image in images], 1, out_specs=(torch.empty(0),))
        return jnp.sum(jnp.sin(out), (0, 2, 3))

    text = compiled(joined, (2, CHANNELS, 5, 5), (2, 8, 5, 5))
    assert re.search(r"f32\[50,40\]\S* concatenate\(", text)


def test_what_reads_the_gradient_of_a_batch_norm_does_not_compute_it_again() -> None:
    vector, image = (CHANNELS,), (2, CHANNELS, 5, 5)

    def parts(vector: Any, image: Any, count: int) -> list[Any]:
        grad, *_ = normalization.native_batch_norm_backward(
            image, image, vector, vector, vector, vector, vector, True, 1e-5, [True] * 3
        )
        size = CHANNELS // count
        return [jnp.cos(grad[:, part * size : (part + 1) * size]) for part in range(count)]

    def kernels(count: int) -> int:
        bodies = fusions(lambda vector, image: parts(vector, image, count), vector, image)
        return sum(" subtract(" in body for body in bodies)

    assert kernels(4) == kernels(1)
