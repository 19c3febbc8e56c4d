"""`consolidate`: the weights of a checkpoint, in however many parts they are, as one safetensors file."""

import json
import math
import os
from pathlib import Path

import safetensors
from torch import Tensor, uint8
from tqdm.auto import tqdm

from xlatrainer.errors import CheckpointError
from xlatrainer.storage.publishing import flush_file, publish_file
from xlatrainer.trainer.checkpoints.files import open_weights
from xlatrainer.trainer.checkpoints.manifest import check_file, manifest_of
from xlatrainer.trainer.checkpoints.parts import PartFiles
from xlatrainer.trainer.checkpoints.places import place_of

__all__ = ["consolidate"]


def consolidate(checkpoint: str | os.PathLike[str], path: str | os.PathLike[str], *, progress: bool = False) -> None:
    """Write the weights of a checkpoint to one safetensors file, as `Trainer.save_weights` would have.

    One tensor at a time is in memory. Neither a model nor a device is needed, and nothing in the files is executed.

    Args:
        checkpoint: A checkpoint's folder or URL, written by one process or several. Its weights are checked first.
        path: The file or URL to write; it appears whole or not at all, and replaces an older one.
        progress: Whether to show progress bars. Default False.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        CheckpointError: If it is damaged, or the file cannot be written; the message names the file.
    """
    place = place_of(checkpoint)
    files = {name: about for name, about in manifest_of(place)["files"].items() if name.startswith("model")}
    size = sum(about["size"] for about in files.values())
    with place.opened(files) as folder:
        with tqdm(total=size, unit="B", unit_scale=True, desc="check", disable=not progress) as bar:
            for name, about in files.items():
                check_file(folder / name, about, f"{place}/{name}")
                bar.update(about["size"])
        with open_weights(folder, files, str(place)) as stored:
            try:
                publish_file(path, lambda file: _write(file, stored, progress))
            except (OSError, safetensors.SafetensorError) as error:
                raise CheckpointError(f"the weights {os.fspath(path)} could not be written: {error}") from error


def _write(path: Path, stored: PartFiles, progress: bool) -> None:
    """Write the tensors one after the other, which safetensors' own functions cannot.

    The format is the length of the header in 8 bytes; the header, JSON with dtype, shape and place of each tensor,
    filled up so that what follows is aligned; and the contents. Those of larger elements come first, which aligns all.
    """
    about = stored.about

    def order(name: str) -> tuple[int, str]:
        return -(about[name].nbytes // max(1, math.prod(about[name].shape))), name

    names = sorted(about, key=order)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **stored.metadata, **stored.pairs}}
    end = 0
    for name in names:
        begin, end = end, end + about[name].nbytes
        header[name] = {"dtype": about[name].dtype, "shape": about[name].shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, tqdm(total=end, unit="B", unit_scale=True, disable=not progress) as bar:
        bar.set_description("write")
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes_of(stored.stored(name)))
            bar.update(about[name].nbytes)
    flush_file(path)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(uint8).numpy().data
