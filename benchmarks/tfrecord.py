"""Reading TFRecord files beside a bare loop over read and google-crc32c, parsing Examples beside the package tfrecord.

`tfrecord` (`pip install tfrecord`) is compared with where it is installed; it checks no checksum. The contenders of a
comparison take turns, and the best turn of each counts: the machine disturbs, it never helps.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import finish, table

LARGE = 100_000  # bytes
ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large", type=int, default=2000, help=f"records of {LARGE:,} bytes (default: 2000)")
    parser.add_argument("--small", type=int, default=20_000, help="Examples of small features (default: 20000)")


def _best(contenders: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Seconds a record, the least of some turns."""
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, read in contenders.items():
            start = time.perf_counter()
            number = read()
            seconds[name] = min(seconds.get(name, float("inf")), (time.perf_counter() - start) / number)
    return seconds


def _write(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    import numpy as np

    import xlatrainer as xla

    generator = np.random.default_rng(0)
    large, small = folder / "large.tfrecord", folder / "small.tfrecord"
    with xla.data.TfRecordWriter(large) as writer:
        for _ in range(options.large):
            writer.write(generator.bytes(LARGE))
    with xla.data.TfRecordWriter(small) as writer:
        for number in range(options.small):
            values = generator.standard_normal(16, np.float32)
            writer.write({"values": values, "label": int(generator.integers(1000)), "name": f"sample {number}"})
    return large, small


def _bare(path: Path) -> int:
    """Read and check every byte, and nothing else."""
    import google_crc32c

    value, number = google_crc32c.value, 0
    with open(path, "rb") as file:
        while header := file.read(12):
            value(header[:8])
            value(file.read(int.from_bytes(header[:8], "little")))
            file.read(4)
            number += 1
    return number


def _records(path: Path) -> int:
    import xlatrainer as xla

    number = 0
    with xla.data.TfRecordReader(path) as reader:
        while reader.read_record() is not None:
            number += 1
    return number


def _parsed(path: Path) -> int:
    """All features as arrays."""
    import xlatrainer as xla
    from xlatrainer.data.tfrecord.example import ExampleParser

    number, parser = 0, ExampleParser()
    with xla.data.TfRecordReader(path) as reader:
        while (record := reader.read_record()) is not None:
            parser.parse(record)
            number += 1
    return number


def _tensors(path: Path) -> int:
    """All features as tensors."""
    import xlatrainer as xla

    with xla.data.TfRecordReader(path) as reader:
        return sum(1 for _ in reader)


def _of_package(path: Path) -> int:
    import tfrecord  # type: ignore[import-not-found]

    return sum(1 for _ in tfrecord.example_loader(str(path), None))


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        large, small = _write(Path(folder), options)
        of_large = _best({"read and google-crc32c": lambda: _bare(large), "TfRecordReader": lambda: _records(large)})
        contenders: dict[str, Callable[[], int]] = {
            "arrays, every checksum": lambda: _parsed(small),
            "tensors, every checksum": lambda: _tensors(small),
        }
        if importlib.util.find_spec("tfrecord"):
            contenders = {"tfrecord, no checksum": lambda: _of_package(small), **contenders}
        of_small = _best(contenders)
    bare = of_large["read and google-crc32c"]
    rows = [[name, f"{LARGE / each / 1e9:.2f}", f"{bare / each:.2f}x"] for name, each in of_large.items()]
    print(table([f"records of {LARGE:,} bytes", "GB/s", "of the bare loop"], rows))
    peer = of_small.get("tfrecord, no checksum")
    rows = [[name, f"{1 / each:,.0f}", f"{peer / each:.1f}x" if peer else "-"] for name, each in of_small.items()]
    print("\n" + table(["Examples of 16 floats, an int, a string", "a second", "of tfrecord"], rows))
    numbers: dict[str, Any] = {"seconds a large record": of_large, "seconds a small record": of_small}
    finish("tfrecord", numbers, options.json)
