"""The numbers of an optimizer's step, computed by the optimizer's own Python for a few parameters instead of all.

An optimizer turns learning rate, betas and step counts into the numbers of its update in Python (a bias correction, a
decay). When a step is replayed these must be as they would have been. A `Shadow` is an optimizer of the same class and
hyperparameters with one parameter for each kind of parameter that is alike in this respect: its `step` is recorded into
a trace that never runs, and the numbers found there are those of the real one. The host's part of the state (step
counts) goes the same way. Whether that holds is not assumed: every observed step is compared (`Section.matches`).

May import: executor, ir, state, tensor, _private_api.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from xlatrainer.backend._private_api import bare_optimizer, bare_step
from xlatrainer.backend.executor import Lost
from xlatrainer.backend.ir import Node, Value, make_spec
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import new_tensor, storage_data
from xlatrainer.errors import LostValueError

__all__ = ["Section", "Shadow", "Unlike"]

_NEVER_READ = Lost("it is a shadow's")  # the contents of its tensors: what is recorded of them never runs


class Unlike(Exception):
    """The optimizer does what a shadow cannot foresee; the text says what."""


class Section:
    """The part of a trace that an optimizer's step recorded, and how its numbers follow from the shadow's.

    Args:
        nodes: the real step's nodes that take floats; others may differ, since a gradient may be a view.
        floats: the real step's floats.
        shadow_nodes, shadow_floats: the shadow's.

    Raises:
        Unlike: if the two do not correspond.
    """

    def __init__(
        self, nodes: list[Node], floats: list[float], shadow_nodes: list[Node], shadow_floats: list[float]
    ) -> None:
        if [node.operation.name for node in nodes] != [node.operation.name for node in shadow_nodes]:
            raise Unlike("its step is not the same sequence of operators for every parameter")
        self.end: Node | None = None  # of the shadow's trace
        self.source: list[int] = []  # of each real float, its position among the shadow's
        first = 0
        for real, shadow in zip(nodes, shadow_nodes, strict=True):
            count, given = real.operation.num_floats, shadow.operation.num_floats
            if count and (not given or count % given):
                raise Unlike(f"{real.operation.name} takes {count} numbers in its step")
            self.source += [first + index * given // count for index in range(count)]
            first += given
        if [shadow_floats[position] for position in self.source] != floats:
            raise Unlike("it computes other numbers for one parameter than for another")

    def matches(self, other: "Section") -> bool:
        """Whether another step's section has the same structure."""
        return self.end is other.end and self.source == other.source


class Shadow:
    """A stand-in for `optimizer`, as it is now; see the module's text.

    Raises:
        Unlike: for an optimizer with hooks around its step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        attributes = vars(optimizer)
        if attributes.get("_optimizer_step_pre_hooks") or attributes.get("_optimizer_step_post_hooks"):
            raise Unlike("it has hooks around its step")
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._classes: list[tuple[torch.nn.Parameter, list[torch.nn.Parameter]]] = []
        self._tensors: list[tuple[torch.Tensor, Value]] = []
        self._shadow = bare_optimizer(optimizer)
        self._shadow.param_groups = [
            {**group, "params": list(self._representatives(group["params"]))} for group in optimizer.param_groups
        ]
        self._host = list(self._host_entries())
        self._versions = self._read_versions()

    def _representatives(self, parameters: list[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """One parameter for all that have a gradient, the same dtype and the same host state."""
        classes: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            entries = self.optimizer.state.get(parameter, {})
            host = tuple((key, _number(value)) for key, value in entries.items() if not _on_device(value))
            device = tuple(key for key, value in entries.items() if _on_device(value))
            classes.setdefault((parameter.dtype, parameter.grad.dtype, host, device), []).append(parameter)
        for (dtype, grad_dtype, _, _), members in classes.items():
            shadow = torch.nn.Parameter(self._dummy(dtype), requires_grad=True)
            shadow.grad = self._dummy(grad_dtype)
            entries = self.optimizer.state.get(members[0], {})
            self._shadow.state[shadow] = {
                key: self._dummy(value.dtype, tuple(value.shape) if not value.dim() else (1,))
                if _on_device(value)
                else (value.clone() if isinstance(value, torch.Tensor) else value)
                for key, value in entries.items()
            }
            self._classes.append((shadow, members))
            yield shadow

    def _dummy(self, dtype: torch.dtype, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
        value = Value(make_spec(shape, dtype), _NEVER_READ)
        tensor = new_tensor(value)
        self._tensors.append((tensor, value))
        return tensor

    def _host_entries(self) -> Iterator[tuple[dict[str, Any], str, list[dict[str, Any]]]]:
        """The host's entries of each shadow's state, with the states that they are copied to."""
        for shadow, members in self._classes:
            entries = self._shadow.state[shadow]
            states = [self.optimizer.state[member] for member in members if member in self.optimizer.state]
            for key, value in entries.items():
                if not _on_device(value) and value is not None:
                    yield entries, key, states

    @property
    def has_host_state(self) -> bool:
        """Whether the host's part of the state moves with every step (a step count)."""
        return bool(self._host)

    def step(self) -> tuple[Node, list[float]]:
        """Record a step of the shadow; returns the node where it ends and its floats. Advances its host state.

        Raises:
            Unlike: if the step reads a tensor's value, which the shadow's have not, or needs parameters of some shape.
        """
        for mine, real in zip(self._shadow.param_groups, self.optimizer.param_groups, strict=True):
            members = mine["params"]
            mine.update(real)
            mine["params"] = members
        before, offset = state.trace, state.random_offset
        scratch = state.trace = state.empty_trace()
        scratch.move = None  # the dummies are nowhere
        try:
            bare_step(self._shadow)
        except LostValueError as error:
            raise Unlike("its step reads a value") from error
        except Exception as error:  # somebody's code, on parameters of one element that it was not made for (Muon)
            raise Unlike(f"its step does not work with one element in place of each parameter: {error}") from error
        finally:
            state.trace, state.random_offset = before, offset
            for tensor, value in self._tensors:
                storage_data(tensor).value = value
        return scratch.node, scratch.floats

    def advance(self) -> None:
        """Bring the real optimizer's host state to where the shadow's is, after its `step`."""
        for entries, key, states in self._host:
            value = entries[key]
            if isinstance(value, torch.Tensor):
                torch.ops.aten._foreach_copy_([s[key] for s in states], [value] * len(states))
            else:
                for entry in states:
                    entry[key] = value
        self._versions = self._read_versions()

    def follows(self) -> bool:
        """Whether the real optimizer's own step has brought its host state to where the shadow's is."""
        self._versions = self._read_versions()
        return all(
            _number(entry[key]) == _number(entries[key]) for entries, key, states in self._host for entry in states
        )

    def is_current(self) -> bool:
        """Whether nobody else has changed the real optimizer: its groups' structure, its host state."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._groups) and self._read_versions() == self._versions

    def settings(self) -> list[Any]:
        """The hyperparameters, to compare."""
        return [
            value
            for group in self.optimizer.param_groups
            for key, value in group.items()
            if key != "params" and not isinstance(value, torch.Tensor)
        ]

    def _read_versions(self) -> list[Any]:
        return [
            entry[key]._version if isinstance(entry[key], torch.Tensor) else entry[key]
            for _, key, states in self._host
            for entry in states
        ]


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
