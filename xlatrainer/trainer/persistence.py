"""`Persistence`: the methods of a Trainer that write to files and read from them."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from xlatrainer.trainer.export import ExportFormat, export_model
from xlatrainer.trainer.saver import Saver
from xlatrainer.trainer.weights import Loaded, NameMap

__all__ = ["Persistence"]


class Persistence:
    """A base class of `Trainer`, and of nothing else.

    Attributes:
        saver: Does the work.
    """

    saver: Saver
    model: nn.Module

    def save(self, path: str | os.PathLike[str], *, async_save: bool = False) -> None:
        """Save the whole state: model, optimizers, callbacks, counters, random states and the place in the data.

        The checkpoint is a folder. It appears whole or not at all, also when the process is killed while it is written;
        an older one at `path` is replaced only by a whole one. `model.safetensors` in it holds the weights. It may be
        called at any time between two steps, by a callback too.

        Several processes that train together all call it; each writes the parts of the tensors on its own devices.

        Args:
            path: The folder, whose parents are made if need be, or a URL that fsspec knows ("gs://", "memory://"); in
                several processes a folder on a disk that they share.
            async_save: Copy the state and return; a thread writes it. An error is raised by the next save, at the
                end of `fit` or by `wait_for_saves`. Default False.

        Raises:
            CheckpointError: If it cannot be written; what was saved before is untouched.
            FileExistsError: If `path` is a folder that holds something else.
            TypeError: If a state holds something that could not be loaded without executing code.
        """
        self.saver.save(path, in_background=async_save)

    def wait_for_saves(self) -> None:
        """Wait until what `save(async_save=True)` writes is on the disk, and raise its error if there is one."""
        self.saver.wait()

    def load(self, path: str | os.PathLike[str], *, strict: bool = True, map: NameMap | None = None) -> Loaded:
        """Load model, optimizers and counters from what `save` wrote, on any device.

        To go on with a training exactly where it was, use `fit(resume_from=path)`, which needs no `load`. No code in
        the files is executed.

        Args:
            path: The folder or URL; or a file that an earlier version of `save` wrote.
            strict: Whether the names of the model must be those of the checkpoint. Default True.
            map: From names in the checkpoint to names in the model, see `load_weights`. Default None, the same names.

        Returns:
            With `strict=False`, the names that were `missing_keys` and `unexpected_keys`.

        Raises:
            CheckpointError: If the checkpoint is damaged; the message names the file.
            ValueError: If it was saved with another optimizer class.
            RuntimeError: If it does not fit the model.
        """
        return self.saver.load(path, strict=strict, names=map)

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Save the model's weights alone, as a safetensors file that needs no xlatrainer to be read.

        It appears whole or not at all. Tied weights are in it once. Several processes that train together all call it,
        and each gathers the whole model; `consolidate` makes the same file of a checkpoint without that.

        Args:
            path: The file, usually ".safetensors", or a URL; its folder is made if need be.

        Raises:
            CheckpointError: If it cannot be written; an older file at `path` is untouched.
        """
        self.saver.save_weights(path)

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True, map: NameMap | None = None) -> Loaded:
        """Load weights into the model, from files of any origin and without executing code.

        Args:
            path: A path or URL: a ".safetensors" file, a checkpoint's folder, a folder of safetensors files as Hugging
                Face writes it, or a state dict of `torch.save`.
            strict: Whether the model's names must be those of the file; shapes always must. Default True. A tied weight
                is there if one of its names is.
            map: From names in the file to names in the model: a dict of names, and of beginnings that end with a dot or
                are empty (`{"": "backbone."}`), or a function, which may return None to leave a weight out. Default
                None, the same names.

        Returns:
            With `strict=False`, the names that were `missing_keys` and `unexpected_keys`.

        Raises:
            FileNotFoundError: If there is nothing at `path`.
            ValueError: If what is there holds no weights.
            RuntimeError: If names or shapes do not fit; the message lists them.
        """
        return self.saver.load_weights(path, strict=strict, names=map)

    def export(
        self,
        path: str | os.PathLike[str],
        example_inputs: Any,
        format: ExportFormat = "torch",
        dynamic_shapes: Any = None,
    ) -> None:
        """Write the model, in eval mode and with its weights, to a file that runs without xlatrainer.

        Args:
            path: The file or a URL; it appears whole or not at all.
            example_inputs: The inputs of a batch, as the model is called with them: a tensor, a tuple, or a dict of
                keyword arguments, on any device.
            format: "torch" (default), for `torch.export.load(path).module()`; "stablehlo", XLA's program for the
                platform in use, which `jax.export.deserialize(bytearray(Path(path).read_bytes())).call(*inputs)` runs,
                or its text if the path ends with ".mlir": a program of all tensors of the inputs in order, with all
                tensors of the predictions in order as results; "onnx".
            dynamic_shapes: As for `torch.export.export`: which dimensions may have other sizes than in the example,
                `({0: torch.export.Dim("batch")},)` for the rows of a single input. Default None, none.

        Raises:
            ImportError: For "onnx" without onnx and onnxscript, and for binary "stablehlo" without flatbuffers;
                the message has the command.
            ValueError: For an unknown format, and for a model that is no single XLA program with "stablehlo".
        """
        export_model(self.model, path, example_inputs, format, dynamic_shapes)
