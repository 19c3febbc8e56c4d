"""ATen operators as JAX functions, one module a family. Importing this package registers them all, and no more."""

from xlatrainer.backend.lowerings import (
    comparison,
    convolution,
    creation,
    embedding,
    foreach,
    indexing,
    linalg,
    loss,
    normalization,
    pointwise,
    pooling,
    random,
    reduction,
    resampling,
    shape,
    spectral,
)

__all__ = [
    "comparison",
    "convolution",
    "creation",
    "embedding",
    "foreach",
    "indexing",
    "linalg",
    "loss",
    "normalization",
    "pointwise",
    "pooling",
    "random",
    "reduction",
    "resampling",
    "shape",
    "spectral",
]
