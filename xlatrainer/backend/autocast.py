"""`torch.autocast("xla")`: which operators run in the lower precision, and which in float32.

torch leaves these lists to a device of this kind. They are those that torch documents for CUDA. A weight that several
operators cast is cast several times in a trace, and once in the program that XLA makes of it.

May import: _private_api.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend._private_api import AUTOCAST_KEY, find_overload, positional_until, tree_map, without_autocast

__all__ = ["register_autocast"]

LOWER = """
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm.input lstm.data gru.input
    gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data scaled_dot_product_attention
"""

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd hinge_embedding_loss kl_div
    l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    cross_entropy_loss norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d upsample_linear1d
"""

# Computed in float32 unless the call says in what: by their argument `dtype`.
FLOAT32_UNLESS_TOLD = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""

WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add cat stack"

_REFUSED = (
    "binary_cross_entropy and BCELoss are unsafe under autocast: probabilities near 0 and 1 are lost in the lower "
    "precision. Use binary_cross_entropy_with_logits or BCEWithLogitsLoss, without the sigmoid before them"
)

_libraries: list[torch.library.Library] = []


def register_autocast() -> None:
    """Register the lists with torch."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, AUTOCAST_KEY)
    aten = torch.library.Library("aten", "IMPL")
    _libraries.extend((rest, aten))
    for names, make in (
        (LOWER, _lower),
        (FLOAT32, _float32),
        (FLOAT32_UNLESS_TOLD, _float32_unless_told),
        (WIDEST, _widest),
        ("binary_cross_entropy", _refused),
    ):
        for name in names.split():
            overload = find_overload(name)
            if overload is not None:  # not all of them are in each torch
                aten.impl(name, make(overload), AUTOCAST_KEY)


def _is_castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "xla"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_castable(value) else value, arguments)


def _calling(overload: Any, dtype_of: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of((args, kwargs))
        with without_autocast():
            args, kwargs = _cast((args, kwargs), dtype)
            return overload(*args, **kwargs)

    return kernel


def _lower(overload: Any) -> Callable[..., Any]:
    return _calling(overload, lambda arguments: torch.get_autocast_dtype("xla"))


def _float32(overload: Any) -> Callable[..., Any]:
    return _calling(overload, lambda arguments: torch.float32)


def _float32_unless_told(overload: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        told = kwargs.get("dtype") is not None or any(isinstance(argument, torch.dtype) for argument in args)
        if _is_castable(args[0]) and not told:
            args, kwargs = args[: positional_until(overload, "dtype")], {**kwargs, "dtype": torch.float32}
        with without_autocast():
            return overload(*args, **kwargs)

    return kernel


def _widest(overload: Any) -> Callable[..., Any]:
    def dtype_of(arguments: Any) -> torch.dtype:
        dtypes: list[torch.dtype] = []
        tree_map(lambda value: dtypes.append(value.dtype) if _is_castable(value) else None, arguments)
        return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("xla")

    return _calling(overload, dtype_of)


def _refused(overload: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_REFUSED)

    return kernel
