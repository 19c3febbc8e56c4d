"""Precision policies: tensors of one dtype, computed and kept on the device in another.

Owns which policy there is: what `precision` says, or else the environment, on top of what the platform does not have.
What follows from a policy is in `dtypes.Policy` and in the specs of values, which say how each one is held.

May import: runtime, dtypes, config, errors.
"""

import warnings
from types import TracebackType
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend import runtime
from xlatrainer.backend.dtypes import Policy, policy, use_policy

__all__ = ["precision", "refresh_policy"]

_Held = dict[torch.dtype, torch.dtype]

POLICIES: dict[str, _Held] = {
    "bf16": {torch.float32: torch.bfloat16, torch.float64: torch.bfloat16},
    "downcast-bf16": {torch.float32: torch.bfloat16, torch.float64: torch.float32},
    "f16": {torch.float32: torch.float16, torch.float64: torch.float16},
    "downcast-f16": {torch.float32: torch.float16, torch.float64: torch.float32},
    "32bit-long": {torch.int64: torch.int32},
}
_SETTINGS = {
    "use_bf16": "bf16",
    "downcast_bf16": "downcast-bf16",
    "use_f16": "f16",
    "downcast_f16": "downcast-f16",
    "use_32bit_long": "32bit-long",
}

# What platforms do not have, with what stands for it. TPUs compute float64 in software, many times as slow.
MISSING: dict[str, _Held] = {"tpu": {torch.float64: torch.float32, torch.complex128: torch.complex64}}


class _Chosen:
    names: tuple[str, ...] | None = None  # by `precision`; None: by the environment
    used: Any = None  # what the current policy was made of
    told = False


class precision:
    """Hold the numbers of tensors on the device in other dtypes than those that the tensors report.

    From the call on, or for the length of a `with` block, as `torch.set_grad_enabled` does. Tensors keep their torch
    dtype; values that are made on the device are kept, and computed, in the other one, and are converted where they are
    copied to the device and back. Values that are there already stay as they are until an operator uses them. Half
    types are computed as torch computes them: in float32, rounded when stored; matrix products and convolutions
    take them as they are. Within one compiled program XLA may leave out roundings.

    In most cases a Trainer's `precision=` or `torch.autocast("xla")` trains better: they keep float32 where it is
    needed. The environment variables `XLA_USE_BF16`, `XLA_DOWNCAST_BF16`, `XLA_USE_F16`, `XLA_DOWNCAST_FP16` and
    `XLA_USE_32BIT_LONG` choose a policy as well; a call of this overrides them.

    Args:
        *names: of policies. "bf16": float32 and float64 are held as bfloat16. "downcast-bf16": float32 as bfloat16 and
            float64 as float32. "f16" and "downcast-f16": the same with float16. "32bit-long": int64 as int32, whose
            range is for you to see to; may be joined with another. Default none: every dtype as it is.

    Raises:
        ValueError: for an unknown name, or two of which each says something else of float32.

    Example:
        >>> import torch, xlatrainer as xla
        >>> with xla.precision("bf16"):
        ...     x = torch.tensor([1.001]).to("xla")
        >>> x.dtype, x.item()
        (torch.float32, 1.0)
    """

    def __init__(self, *names: str) -> None:
        _policy(names, {})
        self._before = _Chosen.names
        _Chosen.names = names
        _follow()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _Chosen.names = self._before
        _follow()


def _follow() -> None:
    """Take the policy at once; if the device was not used yet, its first value does: a setting starts no XLA."""
    if runtime.is_device_chosen():
        refresh_policy()


def refresh_policy() -> str:
    """Take the policy that is asked for now; returns its name.

    Called where values begin: at the first operator of a trace, and where something is copied to the device.
    """
    names = _by_environment() if _Chosen.names is None else _Chosen.names
    platform = _platform()
    if (names, platform) != _Chosen.used:
        use_policy(_policy(names, MISSING.get(platform, {})))
        _Chosen.used = (names, platform)
    return policy().name


def _platform() -> str:
    return str(runtime.default_device().platform)


def _by_environment() -> tuple[str, ...]:
    names = tuple(name for setting, name in _SETTINGS.items() if config.get(setting) == "1")
    if names and not _Chosen.told:
        _Chosen.told = True
        warnings.warn(
            f"the environment asks for the precision {', '.join(names)}: a Trainer's precision=, or "
            'torch.autocast("xla"), keeps float32 where it is needed',
            stacklevel=2,
        )
    return names


def _policy(names: tuple[str, ...], missing: _Held) -> Policy:
    held = dict(missing)
    by: dict[torch.dtype, str] = {}
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"{name!r} is no precision policy; there are {', '.join(map(repr, POLICIES))}")
        for dtype, other in POLICIES[name].items():
            if by.setdefault(dtype, name) != name:
                raise ValueError(
                    f"the precisions {by[dtype]!r} and {name!r} do not go together: both say what {dtype} is"
                )
            held[dtype] = other
    kept = frozenset(dtype for dtype in missing if dtype not in by)
    text = " ".join(f"{dtype}={other}" for dtype, other in held.items()).replace("torch.", "")
    return Policy(text, held, kept)
