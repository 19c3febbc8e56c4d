"""What the operator suite does not compare in the plain way, each entry with its reason.

- `EXCLUDED`: known to differ. Strict: once everything that an entry covers passes, the suite fails until it is removed,
  unless the entry says that it passes by chance.
- `FREE`: what the operator gives is not determined (random, undefined); shapes, dtypes and devices are compared.
- `LOOSE`: (rtol, atol, reason) where neither the dtype's tolerance nor the CPU's own rounding is the right measure.
- `CANONICAL`: results are determined only up to a choice (which of equal elements, the sign of an eigenvector); what is
  determined is made of them first, on either device.
- `LEAVES`: operators whose results may be on the CPU.
- `STAYS_ON_CPU`: arguments that torch wants on the CPU whatever the device.

Names are those of torch's database: an operator's (all its variants) or `name.variant`. The entries hold for the
release of torch in `RELEASE`; with another one the suite does not insist that excluded operators fail.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CANONICAL", "EVERYDAY", "EXCLUDED", "FREE", "LEAVES", "LOOSE", "RELEASE", "STAYS_ON_CPU", "Exclusion"]

RELEASE = "2.14"
F32, I64, BOOL, BF16, C64 = torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64


@dataclass(frozen=True)
class Exclusion:
    """What is known to differ.

    Attributes:
        reason: why, and what would mend it.
        dtypes: of the inputs; empty for all that the suite tries.
        ways: names of `opinfo_samples.Way`; empty for all.
        by_chance: whether some runs find no difference.
    """

    reason: str
    dtypes: tuple[torch.dtype, ...] = ()
    ways: tuple[str, ...] = ()
    by_chance: bool = False

    def covers(self, dtype: torch.dtype, way: str) -> bool:
        return (not self.dtypes or dtype in self.dtypes) and (not self.ways or way in self.ways)


_SPARSE = Exclusion("the device has no sparse tensors")

_JITERATOR = """
    jiterator_2inputs_2outputs jiterator_4inputs_with_extra_args jiterator_binary jiterator_binary_return_by_ref
    jiterator_unary
    """

EXCLUDED: dict[str, tuple[Exclusion, ...]] = {
    **dict.fromkeys(_JITERATOR.split(), (Exclusion("for CUDA only: the CPU refuses it too"),)),
    "sparse.sampled_addmm": (_SPARSE,),
    "sparse.mm": (_SPARSE,),
    "to_sparse": (_SPARSE,),
    "chalf": (Exclusion("XLA has no complex32"),),
    "linalg.householder_product": (
        Exclusion(
            "the CPU's own gradients lose five digits of complex64; compared in complex128 elsewhere",
            (C64,),
            by_chance=True,
        ),
    ),
    **dict.fromkeys(
        ["native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"],
        (Exclusion("statistics of half types are float32 here, as on GPUs: the CPU's lose digits", (BF16,)),),
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": (
        Exclusion("the CPU's kernel reads inputs wrongly whose last dim has strides", (F32,), ("STRIDED",)),
        Exclusion("the same, often within what the CPU's own error allows", (BF16,), ("STRIDED",), by_chance=True),
    ),
}

_RANDOM = """
    bernoulli cauchy exponential geometric log_normal multinomial normal rand_like randint randint_like randn randn_like
    uniform nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward nn.functional.rrelu pca_lowrank svd_lowrank
    """
_UNDEFINED = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
FREE: dict[str, str] = {
    **dict.fromkeys(_RANDOM.split(), "draws random numbers, of which the device has its own: see test_random.py"),
    **dict.fromkeys(_UNDEFINED.split(), "what it holds is undefined"),
}

LOOSE: dict[str, tuple[float, float, str]] = {
    "matrix_exp": (
        5e-5,
        1e-5,
        "another approximation than torch's: both are rounded to some units of the largest element, which of the two "
        "comes nearer for a sample differs between processors",
    ),
}


# The argument that is the dim, by position behind the input, for operators that give values and where they stand.
_DIM_POSITION = {
    "argsort": 0,
    "kthvalue": 1,
    "median": 0,
    "mode": 0,
    "nanmedian": 0,
    "sort": 0,
    "topk": 1,
}


def _elements_at(name: str) -> Callable[..., Any]:
    """The values, and those that stand where the indices point: equal elements may stand in any order."""
    position = _DIM_POSITION[name]

    def canonical(results: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        values, indices = (None, results) if isinstance(results, torch.Tensor) else results
        if kwargs.get("stable"):
            return values, indices
        if indices.dtype is not torch.int64:
            return results  # the median of all elements: no indices
        dim = kwargs.get("dim", args[position] if position < len(args) else -1)
        if input.dim() == 0:
            return values, indices
        places = indices if indices.dim() == input.dim() else indices.unsqueeze(dim)
        return values, input.detach().gather(dim, places), indices.shape

    return canonical


CANONICAL: dict[str, Callable[..., Any]] = {name: _elements_at(name) for name in _DIM_POSITION}

LEAVES = {"to": "some of its samples say where to, and that is the CPU"}

STAYS_ON_CPU: dict[str, tuple[int | str, ...]] = {
    "tensor_split": (1, "tensor_indices_or_sections"),
}

_EVERYDAY = """
    __getitem__ abs add addbmm addcdiv addcmul addmm addmv all amax amin any arange argmax argmin baddbmm bitwise_and
    bitwise_not bmm bool cat ceil chunk clamp clamp_max clamp_min clone constant_pad_nd contiguous copysign cos cumsum
    diagonal div dot einsum eq erf exp expand expm1 eye fill flatten flip float floor floor_divide full gather ge gt
    half index_add index_copy index_fill index_put index_select int isfinite isinf isnan le lerp linalg.vector_norm
    linspace log log1p log_softmax logical_and logical_not logical_or logsumexp lt masked_fill masked_scatter matmul
    max maximum mean min minimum mm movedim mul mv ne neg new_full new_ones new_zeros nn.functional.batch_norm
    nn.functional.adaptive_avg_pool2d nn.functional.avg_pool2d nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.elu
    nn.functional.embedding nn.functional.gelu nn.functional.glu nn.functional.group_norm nn.functional.hardswish
    nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm
    nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool2d
    nn.functional.mse_loss nn.functional.nll_loss nn.functional.normalize nn.functional.one_hot nn.functional.pad
    nn.functional.pixel_shuffle nn.functional.relu nn.functional.rms_norm nn.functional.scaled_dot_product_attention
    nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softplus nn.functional.unfold norm ones_like outer
    permute pow prod reciprocal remainder repeat reshape roll rsqrt scatter scatter_add scatter_reduce select
    select_scatter sigmoid sign sin slice slice_scatter softmax sort split sqrt squeeze stack std sub sum t take tanh
    tile topk trace transpose tril triu true_divide unbind unfold unsqueeze var var_mean view where zeros_like
    """
EVERYDAY = frozenset(_EVERYDAY.split())  # what everyday models are made of
