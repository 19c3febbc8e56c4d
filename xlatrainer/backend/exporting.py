"""A function of tensors as one program that needs neither torch nor this package to run.

May import: program, executor, tensor, state, runtime, counters, config.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax import export as jax_export

from xlatrainer import config
from xlatrainer.backend import counters, runtime
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.program import Graph, lower_program
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import value_of

__all__ = ["exported_program"]


def exported_program(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> jax_export.Exported:
    """`function` as a program of `inputs` alone: what else it reads (weights) becomes constants.

    Its operators are recorded once, and run, since there is nothing else to do with what was recorded.

    Args:
        function: Returns tensors on the device.
        inputs: Tensors on the device, of the shapes and dtypes that the program is for.

    Raises:
        ValueError: If the function draws random numbers, or is no single program: it reads values, or an operator of
            it runs on the CPU.
    """
    with state.lock:
        run_pending("a program is exported")
        before = counters.value("Execute")
        given = [value_of(tensor) for tensor in inputs]
        outputs = [value_of(tensor) for tensor in function(*inputs)]
        trace = state.trace
        if counters.value("Execute") != before:
            raise ValueError("the model is no single program: it reads values, or an operator of it runs on the CPU")
        if trace.random_draws:
            raise ValueError("the model draws random numbers in eval mode, which an exported program cannot")
        slots = tuple(trace.slot_of(value) for value in outputs)
        recorded = Graph(trace.node, slots)
        leaves = runtime.copies([leaf.buffer for leaf in trace.leaves])  # the run may be given the originals
        position_of = {id(leaf.value()): position for position, leaf in enumerate(trace.leaves)}
        places = [position_of.get(id(value)) for value in given]
        floats, ints = list(trace.floats), list(trace.ints)
        run_pending("a program is exported")

    def program(*arguments: Any) -> tuple[Any, ...]:
        values = list(leaves)
        for place, argument in zip(places, arguments, strict=True):
            if place is not None:  # an input may go unused
                values[place] = argument
        return tuple(lower_program(recorded, values, jax.numpy.array(floats), jax.numpy.array(ints), None))

    shapes = [jax.ShapeDtypeStruct(value.buffer.shape, value.buffer.dtype) for value in given]
    with runtime.x64(), config.override(check_indices="off"), jax.default_device(runtime.default_device()):
        platform = "cuda" if runtime.default_device().platform == "gpu" else runtime.default_device().platform
        return jax_export.export(jax.jit(program, keep_unused=True), platforms=(platform,))(*shapes)
