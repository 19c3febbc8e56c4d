"""Trains the same model, from the same weights and on the same batches, with CPU torch and on `xla`, and compares.

A `Case` is one row of a table; `compare` runs it and gives a `Record`, which becomes a row of docs/models.md.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import xlatrainer as xla
from xlatrainer.backend.state import state
from xlatrainer.strategies.single import SingleDeviceStrategy

STEPS = 3
TOLERANCE = 1e-3  # relative, on losses, gradient norms, outputs and running statistics, in float32
TOLERANCE_64 = 1e-6  # the same in float64
SEED = 0
NUM_CLASSES = 10
ROUNDING = "a ReLU whose input is 0 but for rounding errors, and batch norms over few numbers"

Batch = dict[str, Any]
"""Keyword arguments of the model, and under `_target` what a loss of ours compares with."""


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def images(size: int, batch: int = 2) -> Callable[[], Batch]:
    """Arguments of a classifier: images (batch, 3, size, size), and a class for each."""
    return lambda: {
        "_args": (torch.randn(batch, 3, size, size),),
        "_target": torch.randint(0, NUM_CLASSES, (batch,)),
    }


def classified(output: Any, batch: Batch) -> Tensor:
    """Cross-entropy of a classifier's scores (batch, NUM_CLASSES)."""
    return F.cross_entropy(output, batch["_target"])


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: what the table calls it.
        make: builds the model with random weights; dropout is switched off afterwards.
        batch: builds the batch of one step.
        loss: the loss of (output, batch), a tensor of shape (). Default: the output's own `.loss`.
        optimizer: makes the optimizer of the parameters.
        train: whether to train; False compares the outputs in eval mode only.
        chaotic: why rounding errors of float32 may grow into more than the tolerance. Such a model trains in float64,
            with a far smaller tolerance; in float32, its outputs in eval mode and the loss of the first step count. One
            that is compared in eval mode only is compared in float64 only.
        fallbacks: operators that may run on the CPU, by name (`aten::nonzero`), each with the reason. Operators that
            stay on the device but end the trace (`sync::nms`) are not among them.
        note: what the reader of the table should know.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Batch], Tensor] = lambda output, batch: output.loss
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = adamw
    train: bool = True
    chaotic: str = ""
    fallbacks: dict[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass
class Record:
    """What a comparison found: a row of the table. Deviations are relative, the largest of each kind."""

    name: str
    parameters: int
    eval_deviation: float = math.nan
    loss_deviation: float = math.nan
    gradient_deviation: float = math.nan
    programs: int = 0
    nodes: int = 0
    first_step: float = math.nan  # seconds of processor time, of all threads, most of it XLA's compiler
    fallbacks: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    own_deviation: float = math.nan  # of CPU torch's gradients (in eval mode its outputs) in float32 from those in
    # float64; chaotic models only
    note: str = ""


@dataclass
class _Run:
    """What one device gave: losses (STEPS,), gradient norms (STEPS, parameters), gradients of the first step."""

    losses: Tensor
    norms: Tensor
    first_gradients: list[Tensor]


def _without_dropout(model: nn.Module) -> nn.Module:
    """The two devices draw different random numbers, so nothing may be dropped."""
    for module in model.modules():
        kind = type(module).__name__
        if "Dropout" in kind or kind in ("StochasticDepth", "DropPath"):
            for attribute in ("p", "drop_prob"):
                if hasattr(module, attribute):
                    setattr(module, attribute, 0.0)
        if isinstance(getattr(module, "drop_rate", None), float):
            module.drop_rate = 0.0  # of timm: for a call of `torch.nn.functional.dropout` in the model's forward
    return model


def _to(batch: Batch, device: str, dtype: torch.dtype) -> Batch:
    def move(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return item.to(device, dtype) if item.is_floating_point() else item.to(device)

    return tree_map(move, batch)


def _call(model: nn.Module, batch: Batch) -> Any:
    inputs = {name: value for name, value in batch.items() if name != "_target"}
    return model(*inputs.pop("_args", ()), **inputs)


def _train(case: Case, model: nn.Module, batches: list[Batch], record: Record | None = None) -> _Run:
    model.train()
    optimizer = case.optimizer(model.parameters())
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    first: list[Tensor] = []
    for number, batch in enumerate(batches):
        start = time.process_time()
        loss, norm, gradients = _step(case, model, optimizer, batch)
        losses.append(loss)
        norms.append(norm)
        first = first or gradients
        del gradients
        if record is not None:
            record.nodes = state.trace.num_nodes
            xla.sync(wait=True)
            if number == 0:
                record.first_step = time.process_time() - start
    return _Run(torch.stack(losses).cpu(), torch.stack(norms).cpu(), [gradient.cpu() for gradient in first])


def _step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> tuple[Tensor, Tensor, list[Tensor]]:
    optimizer.zero_grad()
    loss = case.loss(_call(model, batch), batch)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    copies = [gradient.detach().clone() for gradient in gradients]
    optimizer.step()
    return loss.detach(), norms, copies


def _evaluate(model: nn.Module, batch: Batch) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        outputs = tree_leaves(_plain(_call(model, batch)))
    return [output.cpu() for output in outputs if isinstance(output, Tensor)]


def _plain(output: Any) -> Any:
    """Outputs of the libraries as dicts and lists; what is neither of those, tensor or number (a cache) is left out."""
    if isinstance(output, dict):
        return {name: _plain(value) for name, value in output.items()}
    if isinstance(output, list | tuple):
        return [_plain(value) for value in output]
    return output


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest number; 0 for two empty tensors."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, on the CPU {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, on the CPU {expected.dtype}"
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite):
        return math.inf
    if not torch.equal(actual[~finite], expected[~finite]) and not expected[~finite].isnan().any():
        return math.inf
    difference = torch.where(finite, (actual - expected).abs(), 0).max().item()
    scale = torch.where(finite, expected.abs(), 0).max().item()
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)


def _gradient_deviation(actual: _Run, expected: _Run) -> float:
    """The largest of: gradients of the first step, as one vector; total norms; norms of single parameters.

    The norm of a parameter whose gradient is nothing but rounding errors (a bias before a normalization) means nothing,
    so differences of single norms are taken relative to the parameter's norm plus a hundredth of the total.
    """
    pairs = list(zip(actual.first_gradients, expected.first_gradients, strict=True))
    apart = math.sqrt(sum((a - b).double().square().sum().item() for a, b in pairs))
    total = torch.linalg.vector_norm(expected.norms, dim=1)
    first = apart / total[0].item()
    totals = ((torch.linalg.vector_norm(actual.norms, dim=1) - total).abs() / total).max().item()
    single = ((actual.norms - expected.norms).abs() / (expected.norms + 0.01 * total[:, None])).max().item()
    return max(first, totals, single)


def _statistics_deviation(actual: nn.Module, expected: nn.Module) -> float:
    """Of the running statistics of batch norms; means in standard deviations, since many are 0 but for rounding."""
    found = [0.0]
    for own, other in zip(actual.modules(), expected.modules(), strict=True):
        if getattr(other, "running_var", None) is None:
            continue
        deviation = (other.running_var + other.eps).sqrt()
        found.append(((own.running_mean.cpu() - other.running_mean) / deviation).abs().max().item())
        found.append(_relative(own.running_var.cpu(), other.running_var))
    return max(found)


def compare(case: Case) -> Record:
    """Run the case on both devices. Raises nothing for a deviation: `check` does."""
    with warnings.catch_warnings():  # counted instead
        warnings.filterwarnings("ignore", message=".*has no lowering for xla", category=RuntimeWarning)
        if not case.chaotic:
            return _compare(case, torch.float32, STEPS)
        if not case.train:
            record = _compare(case, torch.float64, STEPS)
            record.own_deviation = _own_deviation_of_outputs(case)
            return record
        first = _compare(case, torch.float32, 1)
        record = _compare(case, torch.float64, STEPS)
        own = _own_deviation(case)
    within = max(first.eval_deviation, first.loss_deviation)
    assert within <= TOLERANCE, f"float32, relative deviation of the outputs and the first loss: {within}"
    record.first_step = first.first_step
    record.own_deviation = own
    return record


def _own_deviation(case: Case) -> float:
    """How far CPU torch's gradients in float32 are from its own in float64, from the same weights on."""
    runs = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(SEED)
        model = _without_dropout(case.make()).to(dtype)
        runs.append(_train(case, model, [_to(case.batch(), "cpu", dtype) for _ in range(STEPS)]))
    return _gradient_deviation(runs[0], runs[1])


def _own_deviation_of_outputs(case: Case) -> float:
    outputs = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(SEED)
        model = _without_dropout(case.make()).to(dtype)
        outputs.append([output.double() for output in _evaluate(model, _to(case.batch(), "cpu", dtype))])
    return max(_relative(a, b) for a, b in zip(*outputs, strict=True))


def _compare(case: Case, dtype: torch.dtype, steps: int) -> Record:
    torch.manual_seed(SEED)
    on_cpu = _without_dropout(case.make()).to(dtype)
    batches = [_to(case.batch(), "cpu", dtype) for _ in range(steps)]
    on_xla = tie(copy.deepcopy(on_cpu).to("xla"), on_cpu)
    moved = [_to(batch, "xla", dtype) for batch in batches]
    record = Record(case.name, sum(p.numel() for p in on_cpu.parameters()), note=case.note)
    record.dtype = str(dtype).removeprefix("torch.")
    xla.sync(wait=True)
    xla.counters.reset()
    expected, actual = _evaluate(on_cpu, batches[0]), _evaluate(on_xla, moved[0])
    assert len(actual) == len(expected) > 0
    record.eval_deviation = max(_relative(a, b) for a, b in zip(actual, expected, strict=True))
    if case.train:
        wanted, given = _train(case, on_cpu, batches), _train(case, on_xla, moved, record)
        record.loss_deviation = ((given.losses - wanted.losses).abs() / wanted.losses.abs()).max().item()
        record.gradient_deviation = _gradient_deviation(given, wanted)
        if steps == STEPS:
            record.eval_deviation = max(record.eval_deviation, _statistics_deviation(on_xla, on_cpu))
    counts = xla.counters.snapshot()
    record.programs = counts.get("UncachedCompile", 0)
    record.fallbacks = {name: count for name, count in counts.items() if "::" in name}
    return record


def tie(model: nn.Module, like: nn.Module) -> nn.Module:
    """Tie the parameters of `model` that are one in `like`: moving a module to another kind of device parts them."""
    names: dict[int, str] = {}
    for name, parameter in like.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    return model


def check(case: Case, record: Record) -> None:
    """Assert what a record must be like."""
    deviations = {"eval": record.eval_deviation}
    if case.train:
        deviations |= {"loss": record.loss_deviation, "gradient": record.gradient_deviation}
    tolerance = TOLERANCE_64 if case.chaotic else TOLERANCE
    wrong = {kind: deviation for kind, deviation in deviations.items() if not deviation <= tolerance}
    assert not wrong, f"relative deviations above {tolerance}: {wrong}"
    on_cpu = {name for name in record.fallbacks if not name.startswith("sync::")}
    assert on_cpu <= set(case.fallbacks), f"ran on the CPU: {sorted(on_cpu)}, allowed are {sorted(case.fallbacks)}"


def fit_on_both(model: nn.Module, batches: list[Any], **options: Any) -> tuple[list[float], list[float]]:
    """The losses of two epochs of `Trainer.fit` with copies of `model`: on `xla` and on the CPU."""
    losses = []
    for strategy in (SingleDeviceStrategy(), SingleDeviceStrategy("cpu")):
        own = copy.deepcopy(_without_dropout(model))
        trainer = xla.Trainer(own, "sgd", strategy=strategy, learning_rate=1e-3, **options)
        losses.append(trainer.fit(batches, epochs=2, verbose=0).history["loss"])
    return losses[0], losses[1]
