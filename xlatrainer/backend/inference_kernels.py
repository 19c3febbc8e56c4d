"""The kernels that torch's attention modules call for inference, where nothing asks for a gradient.

Torch has them for single devices only; here they are made of the operators that the modules use for training. Nested
tensors do not exist on the device: `nn.TransformerEncoder` is told that none can be made, and takes its usual path.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["kernels"]

aten = torch.ops.aten


def native_multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query, key and value are (batch, length, embed_dim); the weights are those of all heads, or their mean."""
    batch, length, _ = query.shape
    width = embed_dim // num_head
    projections = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        torch.nn.functional.linear(x, weight, bias).view(batch, -1, num_head, width).transpose(1, 2)
        for x, weight, bias in projections
    )
    scores = (q * width**-0.5) @ k.transpose(-1, -2)
    weights = scores.softmax(-1) if mask is None else aten._masked_softmax(scores, mask.bool(), 3, mask_type)
    mixed = (weights @ v).transpose(1, 2).reshape(batch, length, embed_dim)
    result = torch.nn.functional.linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return result, None
    return result, weights.mean(1) if average_attn_weights else weights


def transformer_encoder_layer_fwd(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type
        )[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = torch.nn.functional.gelu(hidden) if use_gelu else hidden.relu()
        return torch.nn.functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


def nested_tensor_from_mask_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """The question whether a nested tensor could be made."""
    return False


def nested_tensor_from_mask(t: torch.Tensor, mask: torch.Tensor, mask_check: bool = True) -> torch.Tensor:
    raise NotImplementedError(
        "the xla device has no nested tensors: make the nn.TransformerEncoder with enable_nested_tensor=False, or "
        "leave its mask_check on"
    )


def kernels() -> dict[str, Callable[..., Any]]:
    """All kernels of this module by overload."""
    return {
        "aten::_native_multi_head_attention": native_multi_head_attention,
        "aten::_transformer_encoder_layer_fwd": transformer_encoder_layer_fwd,
        "aten::_nested_tensor_from_mask_left_aligned": nested_tensor_from_mask_left_aligned,
        "aten::_nested_tensor_from_mask": nested_tensor_from_mask,
    }
