"""Batches on the device: `MpDeviceLoader`, `ParallelLoader`, and what moves one batch.

Owns the move of a batch to the device and the end of a step with each batch asked for. The threads are `prefetch`'s.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import xlatrainer.backend.device as xla_device
import xlatrainer.backend.transfer as transfer
from xlatrainer.data.prefetch import Prefetched, PrefetchIterator, checked_count
from xlatrainer.nested import map_tensors, tensors_in

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader", "send_cpu_data_to_device", "shard_batch"]


class PerDeviceLoader:
    """One pass over the batches of a loader, on the device: an iterator.

    Asking for a batch ends the step of the one before (`xla.sync()`), or every `batches_per_execution`th one does, and
    so does the end of the data: what the loop records between two batches is one program, which runs while the next
    batch is waited for.
    """

    def __init__(
        self, start: Callable[[], PrefetchIterator], length: Callable[[], int], batches_per_execution: int, lazy: bool
    ) -> None:
        self._start = start
        self._length = length
        self._batches_per_execution = batches_per_execution
        self._is_lazy = lazy
        self._batches: PrefetchIterator | None = None
        self._asked_for = 0
        self._is_over = False

    def __iter__(self) -> "PerDeviceLoader":
        return self

    def __len__(self) -> int:
        """How many batches the pass has in all; raises `TypeError` where the loader does not know."""
        return self._length()

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._batches is None:
            self._batches = self._start()
        is_boundary = self._asked_for % self._batches_per_execution == 0
        if is_boundary:
            self._end_step()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            if not is_boundary:
                self._end_step()
            raise
        self._asked_for += 1
        return batch

    next = __next__

    def close(self) -> None:
        """End the pass before its end. Its threads are gone when this returns, except in the midst of a batch."""
        if self._batches is not None:
            self._batches.close()

    def _end_step(self) -> None:
        if self._is_lazy:
            xla_device.sync()


class ParallelLoader:
    """Batches of a loader on the device, loaded and copied by threads while the device computes.

    Args:
        loader: A DataLoader or another iterable of batches on the host: tensors and NumPy arrays in tuples, named
            tuples, lists, dicts, dataclasses and `DataWrapper`s; what else is in them (strings, None) is passed on.
        devices: The devices, or one; there is one a process, "xla:0" ("cpu" leaves the batches there, to compare).
        batchdim: The dimension that counts the rows of a batch; default 0.
        batches_per_execution: A step is ended every so many batches, so that as many are one program. Default 1.
        loader_prefetch_size: At most so many batches are loaded ahead on the host; default 8.
        device_prefetch_size: At most so many wait on the device; default 4.
        host_to_device_transfer_threads: How many batches are copied at the same time; default 1.
        input_sharding: How each tensor is placed on several devices: a `ShardingSpec`, or another object with
            `apply(tensor)`, which takes a CPU tensor and returns it on the device; or a dict of such objects and None
            by the keys of the batch, which must be a dict then. A tensor with another number of dimensions than the
            spec (`can_apply`) is whole on every device. Default None: all are.

    Raises:
        ValueError: For several devices, numbers below 1, or no devices.
        IndexError: For a device that does not exist.
        TypeError: For what cannot be iterated over, and for an `input_sharding` without `apply`.

    Batches come in order, each once. An exception of the loader, of one of its workers or of the copying is raised in
    its batch's place with its own traceback. Leaving the loop, dropping the iterator or `close` ends the threads
    within a second; a batch that is being loaded then cannot be interrupted, so that it takes as long as it takes.

    What of the loader runs in this process runs on a thread of its own, ahead of the training. A dataset that draws
    global random numbers (`random`, `numpy.random`, `torch.rand`) should have workers or a generator of its own: it
    takes turns with whatever else the program draws.

    Example:
        >>> import torch
        >>> loader = ParallelLoader([(torch.ones(2), "first")], ["xla:0"])
        >>> [(batch.sum().item(), name) for batch, name in loader.per_device_loader("xla:0")]
        [(2.0, 'first')]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        devices: Sequence[torch.device | str] | torch.device | str,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 8,
        device_prefetch_size: int = 4,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        if not isinstance(loader, Iterable):
            raise TypeError(f"a DataLoader or another iterable of batches is needed, got {type(loader).__name__}")
        if not isinstance(batchdim, int) or batchdim < 0:
            raise ValueError(f"batchdim must be the number of a dimension, from 0, got {batchdim!r}")
        self.device = _one_device(devices)
        self.batch_dim = batchdim
        self.batches_per_execution = checked_count("batches_per_execution", batches_per_execution)
        _check_sharding(input_sharding)
        self._is_sharded = input_sharding is not None
        self.batches = Prefetched(
            loader,
            partial(send_cpu_data_to_device, device=self.device, input_sharding=input_sharding),
            checked_count("loader_prefetch_size", loader_prefetch_size),
            checked_count("device_prefetch_size", device_prefetch_size),
            checked_count("host_to_device_transfer_threads", host_to_device_transfer_threads),
        )

    def per_device_loader(self, device: torch.device | str) -> PerDeviceLoader:
        """An iterator over one pass, whose batches are on `device`; its threads start with the first batch.

        Raises:
            ValueError: If it is not the device that the loader was made for.
        """
        if _existing(device) != self.device:
            raise ValueError(f"this loader is for {self.device}, not for {device}")
        lazy = self.device.type == "xla"
        return PerDeviceLoader(self.batches.__iter__, self.batches.__len__, self.batches_per_execution, lazy)

    @property
    def batches_for_trainer(self) -> Prefetched:
        """The batches for a Trainer, which ends steps itself, and pads batches and places them as its strategy says.

        Still on the host, therefore, unless `input_sharding` says where each tensor belongs.
        """
        return self.batches if self._is_sharded else self.batches.unmoved()

    def close(self) -> None:
        """End the pass that is going on, and its threads."""
        self.batches.close()


class MpDeviceLoader:
    """A loader whose batches are on the device: each iteration is a pass over `loader`, loaded and copied ahead.

    Asking for a batch ends the step of the one before, so that a loop over it needs no `xla.sync()`. What is not said
    here (`dataset`, `sampler`, `batch_size`) is the loader's own.

    Args:
        loader: As for `ParallelLoader`.
        device: The device; default None, which means that of this process.
        kwargs: Those of `ParallelLoader`.

    A Trainer takes it too: the threads load ahead, and the Trainer copies batches and ends steps itself.

    `state_dict()` is the position, to go on from after `load_state_dict` in the midst of a pass, exactly, though the
    threads are ahead of it. A loader with a `state_dict` of its own (torchdata's `StatefulDataLoader`) keeps it; others
    are drawn from again, without loading where the dataset is known to be deterministic (`is_deterministic = True`).

    Example:
        >>> import torch
        >>> loader = MpDeviceLoader([torch.ones(2), torch.zeros(2)], "xla", device_prefetch_size=2)
        >>> len(loader), [batch.device.type for batch in loader]
        (2, ['xla', 'xla'])
    """

    def __init__(self, loader: Iterable[Any], device: torch.device | str | None = None, **kwargs: Any) -> None:
        self._parallel = ParallelLoader(loader, xla_device.device() if device is None else device, **kwargs)

    @property
    def batches_for_trainer(self) -> Prefetched:
        """See `ParallelLoader`."""
        return self._parallel.batches_for_trainer

    def __len__(self) -> int:
        return len(self._parallel.batches)

    def __iter__(self) -> PerDeviceLoader:
        return self._parallel.per_device_loader(self._parallel.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        try:
            return getattr(self._parallel.batches.source, name)
        except AttributeError:
            source = type(self._parallel.batches.source).__name__
            raise AttributeError(f"neither {type(self).__name__} nor its {source} has {name!r}") from None

    def set_epoch(self, epoch: int) -> None:
        """Tell it to the loader, its samplers and its dataset, where they have `set_epoch`."""
        self._parallel.batches.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last: plain data and CPU tensors."""
        return self._parallel.batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` says; sets the host's random states. Samplers must be as then."""
        self._parallel.batches.load_state_dict(state)

    def close(self) -> None:
        """End the pass that is going on, and its threads."""
        self._parallel.close()


def send_cpu_data_to_device(datas: Any, device: torch.device | str, input_sharding: Any = None) -> Any:
    """`datas` with its tensors and arrays on the device: the same structure, where all else is as it was.

    Args:
        datas: Tensors and arrays nested as `ParallelLoader` says. What is on the device already stays.
        device: The device.
        input_sharding: As for `ParallelLoader`; default None.

    Returns:
        The same structure; a mapping comes back as a dict. Strides and `requires_grad` are kept.

    Raises:
        ValueError: If `input_sharding` is a dict that does not fit the keys of `datas`, or a tensor to be sharded is on
            the device already.
    """
    device = torch.device(device)
    if not isinstance(input_sharding, Mapping):
        return map_tensors(partial(_to_device, device=device, sharding=input_sharding), datas)
    if not isinstance(datas, Mapping):
        raise ValueError(
            f"input_sharding is a dict with the keys {list(input_sharding)}, so the batch must be a dict with them; "
            f"it is a {type(datas).__name__}"
        )
    missing = [
        key for key, value in datas.items() if key not in input_sharding and any(True for _ in tensors_in(value))
    ]
    unknown = [key for key in input_sharding if key not in datas]
    if missing or unknown:
        raise ValueError(
            f"input_sharding has the keys {list(input_sharding)}, the batch {list(datas)}: give each key of the batch "
            f"its sharding, or None"
        )
    return {
        key: map_tensors(partial(_to_device, device=device, sharding=input_sharding.get(key)), value)
        for key, value in datas.items()
    }


def _to_device(tensor: Tensor, device: torch.device, sharding: Any) -> Tensor:
    """One tensor of a batch, where it belongs: the one place that knows how."""
    if sharding is not None:
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor to be sharded must be on the CPU; this one is on {tensor.device}")
        if not hasattr(sharding, "can_apply") or sharding.can_apply(tensor):
            return sharding.apply(tensor)
    if tensor.device.type == "cpu" and device.type == "xla":
        return transfer.uploaded(tensor)
    return tensor.to(device)


def shard_batch(batch: Any, num_shards: int, batchdim: int = 0, *, uneven: bool = False) -> list[Any]:
    """The rows of a batch split among devices or processes, in order: nothing is dropped or repeated.

    Args:
        batch: Tensors and arrays nested as `ParallelLoader` says; all tensors with more dimensions than `batchdim` must
            have as many rows. Others, and what is no tensor, are in every shard.
        num_shards: How many shards, at least 1.
        batchdim: The dimension to split; default 0.
        uneven: Whether the first shards may have a row more than the last ones. Default False: an error.

    Returns:
        The shards, views of the batch.

    Raises:
        ValueError: If the rows cannot be split so, are fewer than the shards, differ between tensors, or if there are
            none.

    Example:
        >>> shard_batch({"x": torch.arange(4), "name": "a"}, 2)
        [{'x': tensor([0, 1]), 'name': 'a'}, {'x': tensor([2, 3]), 'name': 'a'}]
    """
    checked_count("num_shards", num_shards)
    rows = {tensor.shape[batchdim] for tensor in tensors_in(batch) if tensor.dim() > batchdim}
    if len(rows) != 1:
        raise ValueError(f"all tensors of a batch must have the same size in dimension {batchdim}, got {sorted(rows)}")
    (count,) = rows
    if count < num_shards or (count % num_shards and not uneven):
        raise ValueError(
            f"{count} rows cannot be split evenly among {num_shards} shards: choose a batch size that {num_shards} "
            f"divides, with drop_last=True, or pass uneven=True if there are at least {num_shards}"
        )

    def part(tensor: Tensor, shard: int) -> Tensor:
        return tensor.tensor_split(num_shards, batchdim)[shard] if tensor.dim() > batchdim else tensor

    return [map_tensors(partial(part, shard=shard), batch) for shard in range(num_shards)]


def _one_device(devices: Sequence[torch.device | str] | torch.device | str) -> torch.device:
    named = [devices] if isinstance(devices, torch.device | str) else list(devices)
    if not named:
        raise ValueError("devices must name the device, 'xla:0'; it is empty")
    found = [_existing(device) for device in named]
    if len(found) > 1:
        raise ValueError(
            f"devices are {', '.join(map(str, named))}, but a process has one torch device, xla:0: several chips are "
            f"reached by sharding (input_sharding), or by a process each"
        )
    return found[0]


def _existing(device: torch.device | str) -> torch.device:
    named = torch.device(device)
    return xla_device.device(named.index) if named.type == "xla" else named


def _check_sharding(sharding: Any) -> None:
    for each in sharding.values() if isinstance(sharding, Mapping) else [sharding]:
        if each is not None and not callable(getattr(each, "apply", None)):
            raise TypeError(
                f"input_sharding must have a method apply(tensor) that takes a CPU tensor and returns it on the "
                f"device, or be a dict of such objects by the keys of the batch; got {type(each).__name__}"
            )
