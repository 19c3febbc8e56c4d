"""The account of a sharded model: what lies where, and what each device holds."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.distributed.sharding import get_sharding_spec, shard_shape

__all__ = ["bytes_per_device", "describe_layout"]


def bytes_per_device(tensor: Tensor) -> int:
    """What a device holds of a tensor on the devices."""
    if tensor.device.type != "xla":
        return 0
    elements = 1
    for size in shard_shape(tensor):
        elements *= size
    return elements * tensor.element_size()


def _state_of(parameter: nn.Parameter, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [
        value
        for optimizer in optimizers
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.device.type == "xla"
    ]


def describe_layout(
    title: str, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], devices: int
) -> str:
    """A table with a line for each parameter, and the sums."""
    rows = [("parameter", "shape", "sharding", "bytes a device", "with optimizer state")]
    total = whole = 0
    for name, parameter in parameters.items():
        state = _state_of(parameter, optimizers)
        own = bytes_per_device(parameter)
        both = own + sum(map(bytes_per_device, state))
        total += both
        whole += sum(tensor.numel() * tensor.element_size() for tensor in [parameter, *state])
        spec = get_sharding_spec(parameter)
        shown = "whole" if spec is None else ", ".join("-" if entry is None else str(entry) for entry in spec)
        rows.append((name, "x".join(map(str, parameter.shape)) or "()", shown, f"{own:,}", f"{both:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if column < 3 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    share = total / whole if whole else 0
    sums = f"parameters and optimizer state: {total:,} bytes on each of {devices} devices, {share:.1%} of {whole:,}"
    return "\n".join([title, *lines, sums])
