"""Show versions, the platform, its devices and memory, and the settings that differ from their defaults."""

import argparse
import os
import platform
import sys
from importlib import metadata

from xlatrainer import config
from xlatrainer.backend.device import real_devices
from xlatrainer.backend.memory import get_memory_info

__all__ = ["add_arguments", "run", "text"]

PACKAGES = ("xlatrainer", "torch", "jax", "jaxlib", "numpy", "torchvision", "transformers", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(options: argparse.Namespace) -> int:
    """Print it."""
    print(text(), end="")
    return 0


def text() -> str:
    """All of it, a line each."""
    lines = [f"python: {platform.python_version()} ({sys.executable})", f"system: {platform.platform()}"]
    lines += [f"{name}: {_version(name)}" for name in PACKAGES]
    lines += [f"cores: {os.cpu_count()}", f"devices: {', '.join(real_devices())}"]
    memory = get_memory_info()
    lines.append(f"memory: {memory['bytes_used'] / 1e9:.2f} GB used of {memory['bytes_limit'] / 1e9:.2f} GB")
    changed = {
        setting.variable: config.get(name)
        for name, setting in config.SETTINGS.items()
        if config.get(name) != setting.default
    }
    lines += [f"setting {variable}: {value}" for variable, value in changed.items()]
    return "".join(line + "\n" for line in lines)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
