"""Reading a cached dataset beside decoding JPEGs, in one run.

The dataset decodes photographs of 500 x 375 pixels, cuts and scales them to 224 x 224, and returns tensors; the caches
hold what it returns. The files are in the system's cache of files, as in a second epoch: decoding reads no disk either.
"""

import argparse
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import finish, table

IMAGES = 48
ROUNDS = 5
FILLERS = 4  # workers that fill a cache at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"passes over the images; default {ROUNDS}")


def _photograph(seed: int) -> bytes:
    """A JPEG with what photographs have: smooth parts, edges and some noise."""
    import numpy as np
    from PIL import Image, ImageDraw

    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:375, 0:500]
    waves = draw.uniform(20, 90, (3, 2))
    smooth = [np.sin(columns / a + seed) * 50 + np.cos(rows / b - seed) * 50 + 128 for a, b in waves]
    image = Image.fromarray(np.clip(np.stack(smooth, -1), 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(30):
        x, y = int(draw.integers(0, 450)), int(draw.integers(0, 330))
        color = tuple(int(value) for value in draw.integers(0, 256, 3))
        pen.ellipse([x, y, x + int(draw.integers(10, 90)), y + int(draw.integers(10, 90))], fill=color)
    pixels = np.asarray(image) + draw.normal(0, 6, (375, 500, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _datasets(folder: Path) -> dict[str, Any]:
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import Dataset

    class Photographs(Dataset[Any]):
        """(image, label); images of shape (3, 224, 224), bytes or floats from 0 to 1."""

        def __init__(self, floats: bool) -> None:
            self.floats = floats

        def __len__(self) -> int:
            return IMAGES

        def __getitem__(self, index: int) -> Any:
            with Image.open(folder / f"{index}.jpg") as image:
                box = (62, 0, 437, 375)
                pixels = np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, box))
            tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
            return (tensor.float() / 255 if self.floats else tensor), index

    for index in range(IMAGES):
        (folder / f"{index}.jpg").write_bytes(_photograph(index))
    return {"bytes": Photographs(False), "floats": Photographs(True)}


def _milliseconds(datasets: dict[str, Any], rounds: int) -> dict[str, float]:
    """Of a sample of each dataset; they take turns, pass by pass."""
    seconds: dict[str, list[float]] = {name: [] for name in datasets}
    for _ in range(rounds + 1):
        for name, dataset in datasets.items():
            start = time.perf_counter()
            for index in range(IMAGES):
                dataset[index]
            seconds[name].append((time.perf_counter() - start) / IMAGES)
    return {name: statistics.median(each[1:]) * 1e3 for name, each in seconds.items()}


def _filled_by_many(source: Any, folder: Path) -> str:
    """Whether workers that fill a cache at once leave each sample exactly once."""
    import warnings

    from xlatrainer.data import CachedDataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, where there are fewer cores than workers
        CachedDataset(source, folder).warmup(num_workers=FILLERS, progress=False)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "METADATA"]
    alone = CachedDataset(None, folder)
    right = all((alone[index][0] == source[index][0]).all() for index in range(IMAGES))
    return f"{FILLERS} workers filled it at once: {len(files)} files for {IMAGES} samples, all right: {right}"


def run(options: argparse.Namespace) -> None:
    import torch

    from xlatrainer.data import CachedDataset

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = _datasets(folder)
        numbers: dict[str, Any] = {}
        rows = []
        for kind, source in sources.items():
            caches = {
                "cached": CachedDataset(source, folder / kind),
                "cached, compress=False": CachedDataset(source, folder / f"{kind}-plain", compress=False),
            }
            for cached in caches.values():
                cached.warmup(progress=False)
            found = numbers[kind] = _milliseconds({"decoded": source, **caches}, options.rounds)
            cells = [f"{value:.2f} ({found['decoded'] / value:.1f}x)" for value in found.values()]
            rows.append([kind, *cells])
        print("Milliseconds a sample, and how much faster than decoding:\n")
        print(table(["images of", *numbers["bytes"]], rows))
        print("\n" + _filled_by_many(sources["bytes"], folder / "many"))
    finish("cache", numbers, options.json)
