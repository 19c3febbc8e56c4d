"""What a batch is made of: inputs, targets and sample weights, in whatever form it comes.

Owns the rules by which a batch is taken apart; looks at types, names and shapes, never at values. Knows nothing of
devices: it works on a batch on the host as on one on the device.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["TARGET_KEYS", "WEIGHT_KEY", "Arguments", "Batch", "as_tensor", "plain_batch", "split_batch"]

TARGET_KEYS = ("labels", "label", "targets", "target")
WEIGHT_KEY = "sample_weight"


class Batch(NamedTuple):
    """A batch taken apart; also a form in which a batch may come.

    Attributes:
        inputs: What the model is called with: a dict for keyword arguments, a tuple or list for positional ones, all
            else as its one argument.
        targets: What loss and metrics compare the output with; default None, none.
        sample_weight: A float or bool tensor of shape (rows,), or of a shape that the targets' begins with; default
            None, all rows count alike.
    """

    inputs: Any
    targets: Any = None
    sample_weight: Any = None


@dataclass(frozen=True)
class Arguments:
    """The arguments that a model's `forward` takes by name.

    Attributes:
        names: Those that it names.
        takes_any: Whether it takes any others too (`**kwargs`).
    """

    names: frozenset[str]
    takes_any: bool

    @classmethod
    def of(cls, model: nn.Module) -> "Arguments":
        """The arguments of `model.forward`.

        Example:
            >>> sorted(Arguments.of(nn.Linear(1, 1)).names)
            ['input']
        """
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = frozenset(parameter.name for parameter in parameters if parameter.kind in kinds)
        return cls(names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters))

    def accept(self, name: str) -> bool:
        return self.takes_any or name in self.names


def split_batch(batch: Any, arguments: Arguments | None = None) -> Batch:
    """The inputs, targets and sample weights of a batch.

    ======================================================  =================================================
    batch                                                   taken as
    ======================================================  =================================================
    tuple or list of 1, 2 or 3                              (inputs,), (inputs, targets), (.., sample_weight)
    named tuple or dataclass with `inputs` and `targets`    these, and its `sample_weight` if it has one
    another named tuple                                     as a tuple
    dict or another mapping, another dataclass              the model's keyword arguments; "labels" are the
                                                            targets too, "sample_weight" is taken out
    a tensor or array                                       inputs without targets
    ======================================================  =================================================

    Args:
        batch: In any of these forms.
        arguments: Those of the model. Of a mapping, labels ("labels", "label", "targets" or "target") that are none of
            them are targets only. Default None: all of it is for the model.

    Raises:
        TypeError: For anything else, and for sample weights that cannot be such: no tensor, or one of integers.
        ValueError: For sample weights with another number of rows than the targets.

    Example:
        >>> split_batch(({"ids": 1}, 2))
        Batch(inputs={'ids': 1}, targets=2, sample_weight=None)
        >>> split_batch({"ids": 1, "labels": 2})
        Batch(inputs={'ids': 1, 'labels': 2}, targets=2, sample_weight=None)
    """
    batch = plain_batch(batch)
    if isinstance(batch, Batch):
        split = batch
    elif isinstance(batch, Mapping):
        split = _split_mapping(batch, arguments)
    elif isinstance(batch, tuple | list) and 1 <= len(batch) <= 3:
        split = Batch(*batch)
    elif isinstance(batch, Tensor | np.ndarray):
        split = Batch(batch)
    else:
        came = f"a {type(batch).__name__}"
        if isinstance(batch, tuple | list):
            came += f" of {len(batch)} items (several inputs go into a tuple: ((a, b), targets))"
        raise TypeError(
            f"a batch must be (inputs, targets), (inputs, targets, sample_weight), a tensor, or a dict or dataclass of "
            f"the model's arguments; got {came}"
        )
    if split.sample_weight is not None:
        _check_weight(split.sample_weight, split.targets)
    return split


def plain_batch(batch: Any) -> Any:
    """`batch` in a form that a compiled step can look into: a dataclass, which it cannot, as what it stands for.

    A dataclass or named tuple with fields `inputs` and `targets` becomes a `Batch`, another dataclass a dict, and
    arrays of float64 in it become tensors (`as_tensor`); all else stays as it is.
    """
    if dataclasses.is_dataclass(batch) and not isinstance(batch, Mapping | type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        batch = Batch(**fields) if _are_of_a_batch(fields) else fields
    elif isinstance(batch, tuple) and not isinstance(batch, Batch) and _are_of_a_batch(getattr(batch, "_fields", ())):
        batch = Batch(**batch._asdict())  # type: ignore[attr-defined]  # it has `_fields`
    return _without_float64(batch)


def as_tensor(array: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """A NumPy array as a tensor that shares its memory, unless it is of float64: that becomes torch's default dtype.

    NumPy computes in float64 unless told otherwise, and hardly anybody means a model's inputs to be so. A tensor stays
    what it is.
    """
    if isinstance(array, Tensor):
        return array
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that must not be written
    tensor = torch.as_tensor(array)
    return tensor.to(torch.get_default_dtype()) if array.dtype == np.float64 else tensor


def _without_float64(tree: Any) -> Any:
    """`tree` with its arrays of float64 as tensors; the same object if there are none."""
    if isinstance(tree, np.ndarray):
        return as_tensor(tree) if tree.dtype == np.float64 else tree
    if isinstance(tree, Mapping):
        items = {key: _without_float64(value) for key, value in tree.items()}
        return tree if all(value is tree[key] for key, value in items.items()) else items
    if isinstance(tree, tuple | list):
        values = [_without_float64(value) for value in tree]
        if all(value is old for value, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def _are_of_a_batch(fields: Iterable[str]) -> bool:
    return {"inputs", "targets"} <= set(fields) <= set(Batch._fields)


def _split_mapping(batch: Mapping[str, Any], arguments: Arguments | None) -> Batch:
    taken = {WEIGHT_KEY} & set(batch)
    label = "labels"
    if arguments is not None:
        label = next((key for key in TARGET_KEYS if key in batch), label)
        taken |= {label} & set(batch) if not arguments.accept(label) else set()
    inputs = {key: value for key, value in batch.items() if key not in taken} if taken else batch
    return Batch(inputs, batch.get(label), batch.get(WEIGHT_KEY))


def _check_weight(weight: Any, targets: Any) -> None:
    if not isinstance(weight, Tensor | np.ndarray) or weight.ndim == 0:
        raise TypeError(
            f"sample weights must be a tensor of shape (rows,), got {_describe(weight)}. The third item of a batch "
            f"holds them; several inputs go into a tuple: ((a, b), targets)"
        )
    if not str(weight.dtype).removeprefix("torch.").startswith(("float", "bfloat", "bool")):
        raise TypeError(
            f"sample weights must be of a float or bool dtype, got {_describe(weight)}. If these are targets: several "
            f"inputs go into a tuple, ((a, b), targets); if they are weights: weights.float()"
        )
    if isinstance(targets, Tensor | np.ndarray) and targets.shape[: weight.ndim] != weight.shape:
        raise ValueError(
            f"sample weights must have one value a row, shape ({', '.join(map(str, targets.shape[:1]))},), or more of "
            f"the targets' dimensions; got shape {tuple(weight.shape)} for targets of shape {tuple(targets.shape)}"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__
