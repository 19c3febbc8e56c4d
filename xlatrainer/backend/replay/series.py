"""Several steps of a plan in one program: a loop on the device, with what each step leaves to the next carried along.

May import: plan, observation, optimizers, executor, program, runtime, execution_time, loaded, tensor, state, ir.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrainer.backend import counters, execution_time, loaded, measurements, runtime
from xlatrainer.backend.executor import Lost, in_turn, tell_apart, tell_compiled
from xlatrainer.backend.ir import Value
from xlatrainer.backend.program import compiled_function, lower_program, random_words
from xlatrainer.backend.replay.observation import Origin
from xlatrainer.backend.replay.optimizers import Shadow
from xlatrainer.backend.replay.plan import Mismatch, Plan
from xlatrainer.backend.state import state
from xlatrainer.errors import ExecutionError

__all__ = ["Series"]


class Series:
    """`number` steps of `plan` as one program.

    Raises:
        Mismatch: if a step hands on something that cannot be carried: a tensor that another place had before, contents
            given to an argument, a result that the next step overwrites.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        seen, program = plan.seen, plan.program
        if seen.moved or any(place.kind != "cell" for place, _ in seen.updates):
            raise Mismatch("a step moves tensors between places")
        if any(origin.kind in ("cell", "argument", "view", "leaf") for origin in seen.outputs):
            raise Mismatch("a step returns a tensor that the next one overwrites")
        written = {place.key: origin for place, origin in seen.updates}
        written.update((key, origin) for keys, origin, _, _ in seen.rebound for key in keys)
        self._carried: list[tuple[int, int]] = []  # position of the leaf, and of the output that it becomes
        self._batch: list[int] = []
        self._fixed: list[int] = []
        for position, places in enumerate(seen.sources):
            origin = next((written[p.key] for p in places if p.kind == "cell" and p.key in written), None)
            if places[0].kind in ("argument", "upload"):
                self._batch.append(position)
            elif origin is None:
                self._fixed.append(position)
            elif len(places) > 1 or origin.kind != "output":
                raise Mismatch("a step leaves contents of one place to another")
            else:
                self._carried.append((position, program.outputs.index(origin.key)))
        self._given = sorted(set(range(len(program.outputs))) - {output for _, output in self._carried})
        self._run: Any = None

    def run(
        self,
        batches: Sequence[list[torch.Tensor]],
        shadows: dict[int, Shadow],
        before_each: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Run the steps; returns what each would have returned. `before_each` is called before a step's numbers."""
        plan, program = self.plan, self.plan.program
        for given in batches:
            plan.check_read(given)
        values = plan.inputs(batches[0]).values
        data = [[plan.argument(position, given).buffer for position in self._batch] for given in batches]
        floats = []
        for step in range(len(batches)):
            if before_each is not None:
                before_each(step)
            floats.append(plan.numbers(shadows))  # the shadows go ahead of the optimizers
        if not all(program.takes(each, plan.ints) for each in floats):
            tell_apart(program)
            self._run = None
        carried, copied = plan.buffers(values, [position for position, _ in self._carried])
        fixed = [values[position].buffer for position in self._fixed]
        draws = plan.seen.draws
        random = [random_words(state.seed, state.random_offset + draws * step) for step in range(self.number)]
        state.random_offset += draws * self.number
        inputs = (
            carried,
            fixed,
            data,
            np.array(floats),
            plan.ints,
            np.array(random),
        )
        if self._run is None:
            self._compile(inputs)
        loaded.used(self)
        began = execution_time.starting()
        try:
            with runtime.x64():
                last, given, failure = self._run(*inputs)
            in_turn(program, (last, failure), failure)
        except jax.errors.JaxRuntimeError as error:
            plan.distribute(batches[-1], values, [Lost.by(error)] * len(program.outputs), copied)
            raise ExecutionError(f"the program of {self.number} steps failed: {error}") from error
        counters.add("Execute")
        execution_time.started(began, [failure], 0)
        if state.reporter is not None:
            state.reporter.executed(program, f"{self.number} steps of a compiled function are replayed")
        program.runs += self.number
        for shadow in shadows.values():
            shadow.advance()
        if program.checks:
            state.checks.append((program, failure.addressable_data(0)))
        outputs: list[Any] = [None] * len(program.outputs)
        for (_, output), array in zip(self._carried, last, strict=True):
            outputs[output] = array
        results = [self._result(step) for step in given[:-1]]
        for output, array in zip(self._given, given[-1], strict=True):
            outputs[output] = array
        return [*results, plan.distribute(batches[-1], values, outputs, copied)]

    def release(self) -> None:
        """Give the machine code back until the next run."""
        self._run = None

    def _compile(self, inputs: tuple[Any, ...]) -> None:
        loaded.make_room()
        program = self.plan.program
        with measurements.timed("CompileTime"), program.partitioning(program.shardings) as mesh:
            self._run = compiled_function(self._steps, inputs, donate=(0,), shardings=self._shardings(mesh))
        counters.add("UncachedCompile")
        cause = f"{self.number} steps become one program (graph and memory are those of one step)"
        assert self.plan.seen.node is not None
        tell_compiled(self.plan.seen.node, program, cause)

    def _shardings(self, mesh: Any) -> Any:
        """Of the program's results; None on the one device."""
        program = self.plan.program
        if program.home is None:
            return None
        of = [found and found.on(mesh) for found in program.shardings]
        each = [of[output] for output in self._given]
        return [of[output] for _, output in self._carried], [each] * self.number, program.home.replicated.on(mesh)

    def _result(self, given: list[Any]) -> Any:
        arrays = dict(zip(self._given, given, strict=True))

        def value_from(origin: Origin) -> Value:
            index = self.plan.program.outputs.index(origin.key)
            value = Value(self.plan.program.specs[index], arrays[index])
            value.sharding = self.plan.program.shardings[index]
            return value

        return self.plan.result((), value_from)

    def _steps(self, carried: Any, fixed: Any, data: Any, floats: Any, ints: Any, random: Any) -> Any:
        """The body of the program. Returns what is carried in the end, each step's other outputs, the first failure."""
        program = self.plan.program

        def step(carry: Any, each: Any) -> Any:
            batch, own_floats, own_random = each
            leaves: list[Any] = [None] * (len(self._carried) + len(self._fixed) + len(self._batch))
            for (position, _), array in zip(self._carried, carry, strict=True):
                leaves[position] = array
            for position, array in [*zip(self._fixed, fixed, strict=True), *zip(self._batch, batch, strict=True)]:
                leaves[position] = array
            outputs = lower_program(program, leaves, own_floats, ints, own_random)
            failure = outputs[len(program.outputs)] if program.checks else jnp.array([-1, 0])
            return [outputs[o] for _, o in self._carried], ([outputs[o] for o in self._given], failure)

        stacked = [jnp.stack(arrays) for arrays in zip(*data, strict=True)]
        last, (given, failures) = jax.lax.scan(step, carried, (stacked, floats, random))
        first = jnp.argmax(failures[:, 0] >= 0)
        return last, [[array[k] for array in given] for k in range(self.number)], failures[first]
