"""`import xlatrainer` registers the device and its operators with torch, and changes nothing else in the process."""

import json
import subprocess
import sys
import textwrap

import pytest

# Runs in a fresh interpreter: snapshot, import, snapshot; prints what differs.
PROGRAM = textwrap.dedent(
    """
    import json, logging, os, random, signal, sys, threading, types, warnings

    import jax
    import numpy
    import torch
    import jax._src.xla_bridge  # the public interface cannot say whether a runtime was started without starting it
    # These a program has loaded anyway; that they add themselves to torch is torch's doing.
    import torch.library, torch.utils.data, torch.utils.backend_registration

    NAMESPACES = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn": torch.nn,
        "torch.nn.Module": torch.nn.Module,
        "torch.nn.functional": torch.nn.functional,
        "torch.nn.utils": torch.nn.utils,
        "torch.nn.Parameter": torch.nn.Parameter,
        "torch.optim": torch.optim,
        "torch.optim.Optimizer": torch.optim.Optimizer,
        "torch.autograd": torch.autograd,
        "torch.utils": torch.utils,
        "torch.utils.data": torch.utils.data,
        "jax": jax,
        "jax.numpy": jax.numpy,
        "numpy": numpy,
    }

    def is_own_submodule(namespace, name, value):
        # A library's submodule shows up in its parent once anybody imports it.
        return isinstance(value, types.ModuleType) and value.__name__ == f"{namespace}.{name}" and name != "xla"

    def attributes():
        found = {}
        for namespace, owner in NAMESPACES.items():
            for name, value in list(vars(owner).items()):
                if not is_own_submodule(namespace, name, value):
                    found[f"{namespace}.{name}"] = value
        return found

    def settings():
        return {
            "environment": dict(os.environ),
            "jax config": {name: repr(value) for name, value in jax.config.values.items()},
            "torch default dtype": str(torch.get_default_dtype()),
            "torch default device": str(torch.get_default_device()),
            "torch threads": torch.get_num_threads(),
            "torch grad mode": torch.is_grad_enabled(),
            "torch deterministic": torch.are_deterministic_algorithms_enabled(),
            "torch matmul precision": torch.get_float32_matmul_precision(),
            "torch random state": torch.get_rng_state().tolist(),
            "numpy random state": repr(numpy.random.get_state()),
            "python random state": repr(random.getstate()),
            "signal handlers": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
            "warning filters": repr(warnings.filters),
            "logging": repr([logging.root.level, logging.root.handlers]),
            "search path": list(sys.path),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
            "jax runtime started": jax._src.xla_bridge.backends_are_initialized(),
        }

    old_attributes, old_settings = attributes(), settings()
    import xlatrainer
    new_attributes, new_settings = attributes(), settings()

    missing = object()
    print(json.dumps({
        "attributes": sorted(
            name
            for name in old_attributes.keys() | new_attributes.keys()
            if old_attributes.get(name, missing) is not new_attributes.get(name, missing)
        ),
        "settings": {
            name: [old_settings[name], new_settings[name]]
            for name in old_settings
            if old_settings[name] != new_settings[name]
        },
        "x64": jax.config.jax_enable_x64,
        "runtime": jax._src.xla_bridge.backends_are_initialized(),
        "upstream": "torch_xla" in sys.modules,
    }))
    """
)

# What registering a device changes, and why each cannot be done without.
ALLOWED_ATTRIBUTES = {
    "torch.Tensor.is_xla",  # torch's own answers for another backend key than the one that we register under
    "torch.xla",  # the device module, where torch looks for it
}


@pytest.fixture(scope="module")
def difference() -> dict[str, object]:
    """What `import xlatrainer` changed in a fresh interpreter."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "the import printed something"
    return json.loads(run.stdout)


def test_it_adds_to_torch_only_the_device(difference: dict[str, object]) -> None:
    assert set(difference["attributes"]) <= ALLOWED_ATTRIBUTES


def test_it_changes_no_setting(difference: dict[str, object]) -> None:
    """Environment, random states, torch's and jax's configuration, threads, signals, logging."""
    assert difference["settings"] == {}


def test_it_leaves_64_bit_types_of_jax_off(difference: dict[str, object]) -> None:
    assert difference["x64"] is False


def test_it_starts_no_runtime(difference: dict[str, object]) -> None:
    """A program may still choose the platform, fork, or start `jax.distributed` after the import."""
    assert difference["runtime"] is False


def test_it_does_not_load_or_pose_as_torch_xla(difference: dict[str, object]) -> None:
    assert difference["upstream"] is False
