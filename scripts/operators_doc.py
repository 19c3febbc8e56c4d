"""Writes docs/operators.md: how each operator of torch runs on the device, from the schemas and the lowerings.

    python scripts/operators_doc.py            writes the file
    python scripts/operators_doc.py --check    exits with 1 where the file is not what would be written

What an operator is called with is compared with the CPU by the operator suite; its tables say in which dtypes. The list
of operators is that of one release of torch, which the file names.
"""

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the suite's tables are no part of the installed package

from tests.backend.opinfo_database import OPERATORS  # noqa: E402
from tests.backend.opinfo_samples import DTYPES, exclusions  # noqa: E402
from tests.backend.opinfo_tables import FREE, RELEASE  # noqa: E402
from xlatrainer.backend._private_api import all_overloads  # noqa: E402
from xlatrainer.backend.kernels import Served, plan  # noqa: E402
from xlatrainer.backend.schema import signature  # noqa: E402

FILE = ROOT / "docs" / "operators.md"

HEAD = f"""# Operators

Written by `python scripts/operators_doc.py` from the schemas of torch {RELEASE} and the registered lowerings; not to be
edited. What operators must agree with is CPU torch; [CONTRIBUTING.md](../CONTRIBUTING.md#add-an-operator) says how to
add one.

How calls of an overload run:

- **lowering**: recorded, and compiled by XLA with what is around it; the module in `xlatrainer/backend/lowerings/`.
- **own kernel**: about storage and geometry (allocation, views, copies): `xlatrainer/backend/storage_kernels.py`.
- **own composition**: made of other operators, differently from torch: `xlatrainer/backend/composites.py`.
- **torch**: made of other operators by torch, views among them; what those are decides.
- **CPU**: runs on the CPU, which ends the trace; counted as `aten::<name>` and warned about once.

*Forms* are those that write an argument and are served by the same lowering: `name_` in place, `out` the `out=`
argument. *Compared* are the dtypes in which the operator suite compares the operators of torch's database that are made
of this one with the CPU: values, in-place forms and other strides in all, gradients in float32 and complex64; in
brackets where only shapes and dtypes are, the values being random or undefined. An empty cell says that the database
has no such operator, not that it fails.
"""

_SHORT = {
    torch.float32: "f32",
    torch.int64: "i64",
    torch.bool: "bool",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
}


def _base(overload: Any) -> str:
    return str(overload._schema.name).removeprefix("aten::")


def _compared() -> dict[str, str]:
    """The dtypes that the suite compares, by the name of the ATen operator."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for op in OPERATORS:
        names = [_SHORT[d] for d in DTYPES if d in op.dtypes and not exclusions(op, d)]
        if op.name in FREE:
            names = [f"({name})" for name in names]
        found[op.aten_name].update(dict.fromkeys(names))
    order = list(_SHORT.values())
    return {base: " ".join(sorted(names, key=lambda n: order.index(n.strip("()")))) for base, names in found.items()}


def _how(overload: Any) -> tuple[str, str]:
    """How calls of an overload run, and by which module of ours."""
    served, lowering, _ = plan(overload)
    if lowering is not None:
        return "lowering", str(lowering.function.__module__).rpartition(".")[2]
    if served is Served.TORCH:
        aliases = any(result.alias_info is not None for result in overload._schema.returns)
        return ("torch, a view" if aliases and signature(overload).functional else "torch"), ""
    return {Served.BY_HAND: "own kernel", Served.COMPOSITE: "own composition", Served.CPU: "CPU"}[served], ""


def _not_for_this_device(overload: Any) -> bool:
    """Operators of other devices and of kinds of tensors that the device does not have."""
    parts = ("cudnn", "miopen", "mkldnn", "mps", "cslt", "sparse", "nested", "quantized", "_triton", "_test_", "jagged")
    return any(part in _base(overload) for part in parts)


def _rows(overloads: Iterable[Any]) -> Iterable[tuple[str, str, str, list[str]]]:
    """Overload, how, module and the forms that its lowering serves beside it."""
    forms: dict[str, list[str]] = defaultdict(list)
    rest = []
    for overload in overloads:
        if plan(overload).served is Served.TWIN:
            own = f"{_base(overload)}" if not signature(overload).out else "out"
            twin = plan(overload).twin.name().removeprefix("aten::")
            if own not in forms[twin]:
                forms[twin].append(own)
        else:
            rest.append(overload)
    for overload in rest:
        name = overload.name().removeprefix("aten::")
        yield name, *_how(overload), sorted(forms[name])


def text() -> str:
    """The whole file."""
    overloads = [o for o in all_overloads() if not _not_for_this_device(o)]
    compared = _compared()
    rows = [
        (name, how, module, own)
        for name, how, module, own in _rows(overloads)
        # A form that writes and that torch makes of others, or of its functional form, says nothing.
        if how == "lowering" or signature(_resolve(name)).functional
    ]
    counts = Counter(how for _, how, _, _ in rows)
    lines = [HEAD, "| how | overloads |", "|---|---|"]
    lines += [f"| {how} | {count} |" for how, count in sorted(counts.items(), key=lambda item: -item[1])]
    lines += ["", "| overload | how | module | forms | compared |", "|---|---|---|---|---|"]
    seen: set[str] = set()
    for name, how, module, own in rows:
        base = name.partition(".")[0]
        dtypes = compared.get(base, "") if base not in seen else ""
        seen.add(base)
        shown = " ".join(f"`{form}`" if form != "out" else form for form in own)
        lines.append(f"| `{name}` | {how} | {module} | {shown} | {dtypes} |")
    return "\n".join(lines) + "\n"


def _resolve(name: str) -> Any:
    base, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), variant or "default")


def main() -> int:
    """Write the file, or with `--check` compare it; see the module's text."""
    parser = argparse.ArgumentParser(description="writes docs/operators.md")
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")
    arguments = parser.parse_args()
    if not torch.__version__.startswith(f"{RELEASE}."):
        print(f"the file is about torch {RELEASE}; this is {torch.__version__}", file=sys.stderr)
        return 2
    current = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    wanted = text()
    if arguments.check:
        print("current" if current == wanted else f"{FILE.relative_to(ROOT)} is out of date: run this without --check")
        return int(current != wanted)
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main())
