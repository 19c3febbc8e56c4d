"""A picture, in text, of which device has which part of a tensor. May import sharding and `backend`."""

import jax
from torch import Tensor

from xlatrainer.distributed.sharding import sharding_of

__all__ = ["visualize_tensor_sharding"]


def visualize_tensor_sharding(tensor: Tensor) -> str:
    """Draw a tensor of one or two dimensions as a grid of its parts, each with the devices that have it.

    Args:
        tensor: On `xla`.

    Returns:
        The drawing; print it.

    Raises:
        ValueError: For more than two dimensions, or none.

    Example:
        >>> import torch
        >>> print(visualize_tensor_sharding(torch.zeros(4, 4, device="xla")))
        +-------+
        | CPU 0 |
        +-------+
    """
    if tensor.dim() not in (1, 2):
        raise ValueError(f"a tensor of one or two dimensions can be drawn, this one has {tensor.dim()}")
    sharding = sharding_of(tensor)
    shape = (1,) * (2 - tensor.dim()) + tuple(tensor.shape)
    devices: dict[tuple[int, int], list[str]] = {}
    if sharding is None:
        devices[0, 0] = [_name(jax.devices()[0])]
    else:
        for device, index in sharding.jax.devices_indices_map(tuple(tensor.shape)).items():
            row, column = [part.start or 0 for part in (slice(None),) * (2 - len(index)) + tuple(index)]
            devices.setdefault((row, column), []).append(_name(device))
    assert len(shape) == 2
    rows, columns = sorted({row for row, _ in devices}), sorted({column for _, column in devices})
    cells = [[" ".join(["", *_in_order(devices[row, column]), ""]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    lines = [rule]
    for line in cells:
        lines += ["|" + "|".join(cell.center(width) for cell, width in zip(line, widths, strict=True)) + "|", rule]
    return "\n".join(lines)


def _name(device: jax.Device) -> str:
    return f"{device.platform.upper()} {device.id}"


def _in_order(names: list[str]) -> list[str]:
    """One device by its name, several by the platform and their numbers."""
    if len(names) == 1:
        return names
    platform = names[0].split()[0]
    return [platform, ",".join(name.split()[1] for name in names)]
