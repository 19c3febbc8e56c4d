"""Shapes and dtypes of results, from torch's own meta kernels; they raise what torch raises for wrong arguments.

The few operators without one are in a table here.

May import: torch, ir.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend.ir import Spec, make_spec

__all__ = ["as_meta", "infer", "meta_tensor"]

aten = torch.ops.aten


def meta_tensor(spec: Spec) -> torch.Tensor:
    """A tensor of this shape and dtype without data."""
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def as_meta(arg: Any) -> Any:
    """An argument with meta tensors in place of `xla` tensors; 0-dim CPU tensors stay, they count as numbers."""
    if isinstance(arg, torch.Tensor):
        return meta_tensor(make_spec(tuple(arg.shape), arg.dtype)) if arg.device.type == "xla" else arg
    return [as_meta(item) for item in arg] if isinstance(arg, list | tuple) else arg


def _geqrf(self: torch.Tensor) -> Any:
    *batch, rows, columns = self.shape
    return self.new_empty(self.shape), self.new_empty(*batch, min(rows, columns))


def _lstsq(self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Solution, residuals, rank and singular values; what a driver does not give is empty."""
    *batch, rows, columns = self.shape
    real = self.new_empty(0).abs()
    vector = b.dim() < self.dim()
    batch = list(torch.broadcast_shapes(batch, b.shape[:-1] if vector else b.shape[:-2]))
    sides = [] if vector else [b.shape[-1]]
    residuals = real.new_empty(*batch, *(sides or [1])) if driver == "gels" and rows > columns else real
    rank = self.new_empty([0] if driver == "gels" else batch, dtype=torch.int64)
    values = real.new_empty(*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else real
    return self.new_empty(*batch, columns, *sides), residuals, rank, values


def _histogram(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return self.new_empty(count), self.new_empty(count + 1)


def _histogramdd(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    return self.new_empty([count if isinstance(count, int) else count.shape[0] - 1 for count in bins])


def _histogramdd_edges(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    return tuple(self.new_empty(count + 1) for count in bins)


def _like(position: int, *dtypes: torch.dtype | None) -> Callable[..., Any]:
    """Results with the shape of one argument, and its dtype where a dtype is None."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        results = tuple(torch.empty_like(args[position], dtype=dtype) for dtype in dtypes)
        return results if len(results) > 1 else results[0]

    return rule


def _ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> Any:
    """Losses, and for each time the probabilities of all states: labels and blanks between and around them."""
    length, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, length, 2 * targets.shape[1] + 1)


def _statistics_dtype(input: torch.Tensor) -> torch.dtype:
    """Of what a normalization saves of the batch: as on GPUs float32 for half types, in which the CPU loses digits."""
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


def _batch_norm(input: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, *rest: Any) -> Any:
    """The output, statistics of the batch, cuDNN's reserve, new running statistics."""
    saved = mean.new_empty(input.shape[1], dtype=_statistics_dtype(input))
    return torch.empty_like(input), saved, saved, input.new_empty(0, dtype=torch.uint8), mean, var


def _saves_when_training(overload: Any) -> Callable[..., Any]:
    """Batch norms: torch's meta kernel has statistics of the batch without training too, where the CPU's are empty."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        out, mean, invstd, *running = overload(*args, **kwargs)
        training = args[5] if len(args) > 5 else kwargs["training"]
        saved = [tensor if training else tensor.new_empty(0) for tensor in (mean, invstd)]
        return out, *saved, *(own.to(given.dtype) for own, given in zip(running, args[3:5], strict=False))

    return rule


def _convolution_backward(grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    """Gradients of input, weight and bias, as far as the mask in the last argument asks for them."""
    mask = rest[-1]
    shapes = (input.shape, weight.shape, (grad_output.shape[1],))
    return tuple(input.new_empty(shape) if asked else None for shape, asked in zip(shapes, mask, strict=True))


def _lstm_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *rest: Any) -> Any:
    """The new hidden and cell state, and the gates."""
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def _gru_cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *rest: Any) -> Any:
    """The new state, and what the gradient needs: five numbers for each of its elements."""
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the state and of both biases."""
    gates = grad_hy.new_empty(grad_hy.shape[0], 3 * grad_hy.shape[1])
    bias = grad_hy.new_empty(3 * grad_hy.shape[1]) if has_bias else None
    return gates, gates, grad_hy, bias, bias


def _binomial(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> Any:
    if count.dtype is not prob.dtype:
        raise RuntimeError(f"binomial: count and prob must have one dtype, got {count.dtype} and {prob.dtype}")
    if torch.broadcast_shapes(count.shape, prob.shape) != count.shape:
        raise RuntimeError(f"binomial: prob of shape {list(prob.shape)} does not broadcast to {list(count.shape)}")
    return torch.empty_like(count)


def _learnable_backward(grad: torch.Tensor, self: torch.Tensor, scale: torch.Tensor, *rest: Any) -> Any:
    """Gradients of the input, the scale and the zero point."""
    return torch.empty_like(self), torch.empty_like(scale), torch.empty_like(scale)


def _new_states(count: int) -> Callable[..., Any]:
    """Fused steps that give new tensors: as many lists, of parameters, gradients and states, as they are given."""

    def rule(*lists: Any, **options: Any) -> Any:
        return tuple([torch.empty_like(tensor) for tensor in given] for given in lists[:count])

    return rule


def _masked_softmax(
    self: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> Any:
    """`mask_type` is read for a mask with 2 dims of an input with 4 (batch, heads, queries, keys) only."""
    if self.dim() != 4 or mask.dim() != 2:
        mask_type = 2
    if mask_type not in (0, 1, 2):
        raise RuntimeError(
            "_masked_softmax: mask_type must be 0 (a mask of queries and keys), 1 (of batch and keys) or 2 (of all), "
            f"got {mask_type}"
        )
    shape = tuple(self.shape)
    wanted = shape if mask_type == 2 else (shape[2] if mask_type == 0 else shape[0], shape[2])
    if tuple(mask.shape) != wanted:
        raise RuntimeError(
            f"_masked_softmax: of an input of shape {list(shape)} the mask (mask_type {mask_type}) must have shape "
            f"{list(wanted)}, got {list(mask.shape)}"
        )
    if dim is not None:
        torch.atleast_1d(self).size(dim)  # raises for one that there is not
    return torch.empty_like(self)


def _masked_softmax_backward(grad_output: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, *rest: Any) -> Any:
    if mask.shape != grad_output.shape:
        raise RuntimeError("Mask shape should match grad shape")
    return torch.empty_like(grad_output)


def _written_only(*args: Any, **kwargs: Any) -> None:
    """For an operator that gives nothing but what it writes."""


def _window(length: int, *rest: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    if length < 0:
        raise RuntimeError(f"kaiser_window requires non-negative window_length, got window_length={length}")
    return torch.empty(length, dtype=dtype, device="meta")


# Operators of which torch has no meta kernel, or one that fails where a weight or bias is missing, or is not the CPU's.
_WITHOUT_META: dict[str, Callable[..., Any]] = {
    "aten::_batch_norm_with_update_functional": _batch_norm,
    "aten::_aminmax": lambda self: (self.new_empty(()), self.new_empty(())),
    "aten::_aminmax.dim": lambda self, dim, keepdim=False: torch.aminmax(self, dim=dim, keepdim=keepdim),
    "aten::_ctc_loss.Tensor": _ctc_loss,
    "aten::_ctc_loss_backward.Tensor": _like(1, None),
    "aten::_native_batch_norm_legit_functional": _saves_when_training(aten._native_batch_norm_legit_functional.default),
    "aten::native_batch_norm": _saves_when_training(aten.native_batch_norm.default),
    "aten::_dirichlet_grad": _like(0, None),
    "aten::_fake_quantize_learnable_per_channel_affine": _like(0, None),
    "aten::_fake_quantize_learnable_per_channel_affine_backward": _learnable_backward,
    "aten::_fake_quantize_learnable_per_tensor_affine": _like(0, None),
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": _learnable_backward,
    "aten::_fused_adagrad": _new_states(4),
    "aten::_fused_adagrad_": _written_only,
    "aten::_fused_adam.tensor_lr": _new_states(5),
    "aten::_fused_adam_.tensor_lr": _written_only,
    "aten::_fused_adamw.tensor_lr": _new_states(5),
    "aten::_fused_adamw_.tensor_lr": _written_only,
    "aten::_fused_sgd": _new_states(3),
    "aten::_fused_sgd.tensor_lr": _new_states(3),
    "aten::_fused_sgd_": _written_only,
    "aten::_fused_sgd_.tensor_lr": _written_only,
    "aten::_logcumsumexp": _like(0, None),
    "aten::_masked_softmax": _masked_softmax,
    "aten::_masked_softmax_backward": _masked_softmax_backward,
    "aten::_sample_dirichlet": _like(0, None),
    "aten::_standard_gamma_grad": _like(0, None),
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::convolution_overrideable": aten.convolution.default,
    "aten::fake_quantize_per_channel_affine_cachemask": _like(0, None, torch.bool),
    "aten::fake_quantize_per_tensor_affine_cachemask": _like(0, None, torch.bool),
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _like(0, None, torch.bool),
    "aten::binomial": _binomial,
    "aten::glu_backward_jvp": _like(0, None),
    "aten::glu_jvp": _like(0, None),
    "aten::kaiser_window": _window,
    "aten::kaiser_window.beta": _window,
    "aten::kaiser_window.periodic": _window,
    "aten::fractional_max_pool3d_backward": _like(1, None),
    "aten::multi_margin_loss_backward": _like(1, None),
    "aten::multilabel_margin_loss_backward": _like(1, None),
    "aten::_histogramdd_bin_edges": _histogramdd_edges,
    "aten::_histogramdd_from_bin_cts": _histogramdd,
    "aten::_histogramdd_from_bin_tensors": _histogramdd,
    "aten::geqrf": _geqrf,
    "aten::histogram.bin_ct": _histogram,
    "aten::histogram.bins_tensor": _histogram,
    "aten::linalg_lstsq": _lstsq,
}


def infer(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Specs of the results of `overload`, in the structure of its results (one, a tuple or list, None where none is).

    `args` and `kwargs` have meta tensors for tensors; a device among them becomes `meta`.
    """
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    with torch.no_grad():
        return _specs(_WITHOUT_META.get(overload.name(), overload)(*args, **kwargs))


def _specs(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return make_spec(tuple(result.shape), result.dtype)
    if isinstance(result, list | tuple):
        return tuple(_specs(item) for item in result)
    return None
