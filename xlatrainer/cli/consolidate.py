"""Make one safetensors file of the weights of a checkpoint that several processes have written.

Works for every checkpoint. The file holds each tensor under its name, tied weights once, and is read by whatever reads
safetensors: Trainer.load_weights, Hugging Face's libraries, or safetensors.torch.load_file. It appears whole or not at
all. One tensor at a time is in memory.
"""

import argparse
import os
import sys

from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.consolidation import consolidate

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the checkpoint's folder or URL")
    parser.add_argument("output", metavar="OUT.safetensors", help="the file or URL to write; an older one is replaced")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Write the file; returns 1 if that cannot be."""
    if os.path.isdir(options.output):
        print(f"consolidate: {options.output} is a folder; give the name of a file in it", file=sys.stderr)
        return 1
    try:
        consolidate(options.checkpoint, options.output, progress=not options.quiet)
    except (CheckpointError, FileNotFoundError) as error:
        print(f"consolidate: {error}", file=sys.stderr)
        return 1
    return 0
