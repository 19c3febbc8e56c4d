"""What differs in a number or a table alone is one kernel, which XLA compiles once."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct

from xlatrainer.backend.lowerings import convolution_cpu, normalization
from xlatrainer.backend.lowerings.convolution import Geometry
from xlatrainer.backend.runtime import compiler_options

CHANNELS = 32


def fusions(function: Any, *shapes: tuple[int, ...]) -> list[str]:
    """The bodies of the program's fused computations for float32 of these shapes, without the names of values."""
    options = compiler_options()  # before anything else starts XLA, which is given the number of devices then
    arguments = [ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile(compiler_options=options).as_text()
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
