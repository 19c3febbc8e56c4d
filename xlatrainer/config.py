"""All settings, in one table, and the only reader of the environment for them.

A setting is read from its environment variable when it is asked for, so that a variable set late still counts;
`override` wins over the environment and is undone at the end of its block.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTINGS", "Setting", "get", "override", "put"]


@dataclass(frozen=True)
class Setting:
    """One row of the table: `variable` is the environment variable, `default` gives the type as well.

    `accepted` lists the values there are; empty means any of the type. `also` are further variables, for when the first
    is not set, each with what its values stand for (itself, if that is empty).
    """

    variable: str
    default: Any
    meaning: str
    accepted: tuple[str, ...] = ()
    also: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()

    def read(self, text: str) -> Any:
        """The value that `text` stands for; raises `ValueError` if it is none of those accepted."""
        if self.accepted and text.lower() not in self.accepted:
            raise ValueError(f"{self.variable}={text!r}: accepted are {', '.join(map(repr, self.accepted))}")
        try:
            return type(self.default)(text)
        except ValueError:
            wanted = type(self.default).__name__
            raise ValueError(f"{self.variable}={text!r} is no {wanted}; it is {self.meaning}") from None


SETTINGS: dict[str, Setting] = {
    "platform": Setting("PJRT_DEVICE", "", "CPU, GPU (or CUDA) or TPU; empty: what jax finds"),
    "cpu_devices": Setting(
        "CPU_NUM_DEVICES", 1, "how many devices XLA makes of the CPU in each process; read at the device's first use"
    ),
    "fallback": Setting(
        "XLATRAINER_FALLBACK", "warn", "operators without a lowering: run on the CPU, or fail", ("warn", "error")
    ),
    "check_indices": Setting(
        "XLATRAINER_CHECK_INDICES", "on", "whether programs compiled from now on check indices", ("on", "off")
    ),
    "replay": Setting("XLATRAINER_REPLAY", "on", "whether a stable step is run without its Python", ("on", "off")),
    "cache_dir": Setting(
        "XLATRAINER_CACHE_DIR",
        "",
        "the folder of compiled programs, or off; empty: xlatrainer in the user's cache folder",
        also=(("XLA_PERSISTENT_CACHE_PATH", ()),),
    ),
    "cache_readonly": Setting(
        "XLATRAINER_CACHE_READONLY",
        "off",
        "whether compiled programs are only read from the cache",
        ("on", "off"),
        also=(("XLA_PERSISTENT_CACHE_READ_ONLY", (("1", "on"), ("0", "off"))),),
    ),
    "cache_megabytes": Setting(
        "XLATRAINER_CACHE_MEGABYTES", 2048, "the size of the cache beyond which the least recently used programs go"
    ),
    "keep_memory": Setting(
        "XLATRAINER_KEEP_MEMORY",
        "on",
        "whether glibc keeps freed memory for the next step if XLA runs on the CPU; read at the device's first use",
        ("on", "off"),
    ),
    "max_async_closures": Setting(
        "XLA_MAX_ASYNC_QUEUE", 100, "asynchronous step closures that may wait before a step waits for them"
    ),
    "debug": Setting("PT_XLA_DEBUG", "0", "whether compilations and executions are analysed", ("0", "1")),
    "debug_level": Setting(
        "PT_XLA_DEBUG_LEVEL", -1, "0: no analysis, 1: of compilations, 2: of executions too; -1: what PT_XLA_DEBUG says"
    ),
    "debug_file": Setting("PT_XLA_DEBUG_FILE", "", "the file that the analysis is appended to; empty: stderr"),
    "ir_debug": Setting(
        "XLA_IR_DEBUG", "0", "whether recorded operators keep the user's whole stack instead of one line", ("0", "1")
    ),
    "hlo_debug": Setting(
        "XLA_HLO_DEBUG", "0", "whether programs carry modules, operators and the user's lines", ("0", "1")
    ),
    "save_tensors_file": Setting(
        "XLA_SAVE_TENSORS_FILE", "", "the file, with .0 behind its name, that every graph that runs is appended to"
    ),
    "save_tensors_format": Setting(
        "XLA_SAVE_TENSORS_FMT", "text", "the form of those graphs", ("text", "dot", "hlo", "stablehlo")
    ),
    "metrics_percentiles": Setting(
        "XLA_METRICS_PERCENTILES",
        "0.01:0.05:0.1:0.2:0.5:0.8:0.9:0.95:0.99",
        "the percentiles that the metrics report shows, from 0 to 1, with colons between them",
    ),
    "metrics_samples": Setting(
        "XLA_METRICS_SAMPLES", 1024, "how many samples of each metric are kept; read at its first sample"
    ),
    "metrics_file": Setting("XLA_METRICS_FILE", "", "the file that the metrics report is appended to at each step"),
    "save_hlo_file": Setting("XLA_SAVE_HLO_FILE", "", "the file that a program is written to that fails"),
    "dump_hlo_graph": Setting(
        "XLA_DUMP_HLO_GRAPH", "0", "whether the error of a program that fails shows its HLO", ("0", "1")
    ),
    "sync_wait": Setting("XLA_SYNC_WAIT", "0", "whether every sync waits for the results", ("0", "1")),
    "get_tensors_opbyop": Setting(
        "XLA_GET_TENSORS_OPBYOP", "0", "whether each operator is a program of its own; read at import", ("0", "1")
    ),
    "sync_tensors_opbyop": Setting(
        "XLA_SYNC_TENSORS_OPBYOP", "0", "the same as XLA_GET_TENSORS_OPBYOP; read at import", ("0", "1")
    ),
    "google_credentials": Setting(
        "GOOGLE_APPLICATION_CREDENTIALS",
        "",
        "the file of credentials for gs:// (read by Google's library); empty: gcloud's, or the machine's",
    ),
    "rank": Setting("RANK", -1, "this process's number among those that form one computation, as torchrun sets it"),
    "world_size": Setting("WORLD_SIZE", 1, "how many processes form one computation, as torchrun sets it"),
    "master_addr": Setting("MASTER_ADDR", "", "the machine of process 0, as torchrun sets it"),
    "master_port": Setting("MASTER_PORT", 0, "the port of the store on it, as torchrun sets it"),
    "agent_store": Setting("TORCHELASTIC_USE_AGENT_STORE", "", "True, set by torchrun, if it keeps that store itself"),
    "restart_count": Setting("TORCHELASTIC_RESTART_COUNT", 0, "how often torchrun has started the processes anew"),
    "join_seconds": Setting("XLATRAINER_JOIN_SECONDS", 120, "how long a process waits for the others to start"),
    "heartbeat_seconds": Setting(
        "XLATRAINER_HEARTBEAT_SECONDS", 30, "after how long without a sign of life a process counts as dead"
    ),
    "local_rank": Setting(
        "LOCAL_RANK", -1, "this process's number on its machine, as torchrun sets it: number 0 writes files"
    ),
    "storage_emulator": Setting(
        "STORAGE_EMULATOR_HOST", "", "the address of an emulator that gs:// goes to, such as localhost:9023"
    ),
    "use_bf16": Setting("XLA_USE_BF16", "0", "whether float32 and float64 are held as bfloat16", ("0", "1")),
    "downcast_bf16": Setting(
        "XLA_DOWNCAST_BF16", "0", "whether float32 is held as bfloat16 and float64 as float32", ("0", "1")
    ),
    "use_f16": Setting(
        "XLA_USE_F16",
        "0",
        "whether float32 and float64 are held as float16",
        ("0", "1"),
        also=(("XLA_USE_FP16", (("0", "0"), ("1", "1"))),),
    ),
    "downcast_f16": Setting(
        "XLA_DOWNCAST_FP16", "0", "whether float32 is held as float16 and float64 as float32", ("0", "1")
    ),
    "use_32bit_long": Setting("XLA_USE_32BIT_LONG", "0", "whether int64 is held as int32", ("0", "1")),
    "max_loaded_programs": Setting(
        "XLATRAINER_MAX_LOADED_PROGRAMS",
        0,
        "compiled programs that stay loaded, the most recently used; 0: as many as vm.max_map_count has room for",
    ),
    "max_pending_nodes": Setting(
        "XLATRAINER_MAX_PENDING_NODES", 2000, "nodes after which the next host-to-device copy ends the trace"
    ),
}

_overrides: dict[str, Any] = {}


def get(name: str) -> Any:
    """The value of the setting `name`, converted to the type of its default."""
    if name in _overrides:
        return _overrides[name]
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text is not None:
        return setting.read(text)
    for variable, meanings in setting.also:
        text = os.environ.get(variable)
        if text is not None:
            return setting.read(_meaning(variable, text, dict(meanings)))
    return setting.default


def _meaning(variable: str, text: str, meanings: dict[str, str]) -> str:
    if meanings and text not in meanings:
        raise ValueError(f"{variable}={text!r}: accepted are {', '.join(map(repr, meanings))}")
    return meanings.get(text, text)


def put(**values: Any) -> None:
    """Set settings for the rest of the process; raises `KeyError` for a name that is not in the table."""
    _refuse_unknown(values)
    _overrides.update(values)


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set settings for the length of a `with` block; raises `KeyError` for a name that is not in the table."""
    _refuse_unknown(values)
    before = dict(_overrides)
    _overrides.update(values)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def _refuse_unknown(values: dict[str, Any]) -> None:
    unknown = set(values) - set(SETTINGS)
    if unknown:
        raise KeyError(f"unknown settings {sorted(unknown)}; there are {sorted(SETTINGS)}")
