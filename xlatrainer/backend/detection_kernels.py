"""Kernels of torchvision's operators that a lowering cannot express: their results are as long as data says.

May import: dtypes, ir, state, tensor, transfer, counters, lowerings.detection.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend import counters
from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.ir import Operation, Spec, make_spec
from xlatrainer.backend.lowerings.detection import without_overlaps
from xlatrainer.backend.recorder import not_on_device
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import new_tensor, value_of
from xlatrainer.backend.transfer import read_to_host

__all__ = ["kernels"]

_operations: dict[tuple[Spec, ...], Operation] = {}


def _suppression(dets: Spec, scores: Spec) -> Operation:
    """The operation for boxes and scores of these specs, whose one float is the threshold."""
    outputs = (make_spec((dets.shape[0],), torch.int64), make_spec((), torch.int64))
    key = (dets, scores, *outputs)
    found = _operations.get(key)
    if found is None:

        def lower(operands: Any, floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
            boxes, ranks = (operand.astype(to_numpy(dets.dtype)) for operand in operands)
            return without_overlaps(boxes, ranks, floats[0])

        found = _operations[key] = Operation("torchvision::nms", lower, outputs, num_floats=1, identity=repr(key))
    return found


def _check_boxes(dets: torch.Tensor, scores: torch.Tensor) -> None:
    for name, tensor in (("dets", dets), ("scores", scores)):
        if tensor.device.type != "xla":
            raise not_on_device("torchvision::nms", name, tensor)
    if dets.dim() != 2 or dets.shape[1] != 4:
        raise RuntimeError(f"torchvision::nms: boxes must have the shape [N, 4], got {list(dets.shape)}")
    if scores.dim() != 1 or scores.shape[0] != dets.shape[0]:
        raise RuntimeError(
            f"torchvision::nms: scores must have the shape [{dets.shape[0]}], one for each box, got "
            f"{list(scores.shape)}"
        )
    if dets.dtype is not scores.dtype:
        raise RuntimeError(f"torchvision::nms: boxes are {dets.dtype} and scores {scores.dtype}; they must be the same")


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """What is kept is found on the device; only its number is read."""
    _check_boxes(dets, scores)
    with state.lock:
        boxes, ranks = value_of(dets), value_of(scores)
        trace = state.trace
        token = (_suppression(boxes.spec, ranks.spec), trace.slot_of(boxes), trace.slot_of(ranks))
        trace.floats.append(float(iou_threshold))
        order, count = map(new_tensor, trace.append(token))
        counters.add("sync::nms")
        kept = int(read_to_host([count])[0].item())
    return order if kept == order.shape[0] else order[:kept].clone()


def kernels() -> dict[str, Callable[..., Any]]:
    """All kernels of this module by operator."""
    return {"torchvision::nms": nms}
