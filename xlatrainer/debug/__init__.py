"""To see what the device did, and why: `from xlatrainer import debug; print(debug.metrics_report())`."""

from xlatrainer.debug.analysis import Recompile, explain_recompiles, install
from xlatrainer.debug.dumps import graph, hlo
from xlatrainer.debug.metrics import (
    clear_all,
    clear_counters,
    clear_metrics,
    counter_names,
    counter_value,
    executed_fallback_ops,
    metric_data,
    metric_names,
    metrics_report,
    short_metrics_report,
)
from xlatrainer.debug.stacks import enable_stack_dumps

__all__ = [
    "Recompile",
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "counter_names",
    "counter_value",
    "enable_stack_dumps",
    "executed_fallback_ops",
    "explain_recompiles",
    "graph",
    "hlo",
    "metric_data",
    "metric_names",
    "metrics_report",
    "short_metrics_report",
]

install()
