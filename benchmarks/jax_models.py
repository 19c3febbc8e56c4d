"""The benchmarks' models as one writes them by hand in JAX: what XLA gives to somebody who does without PyTorch.

Each model is a pure function of arrays, and a training step is one `jax.jit` with its state donated. The layouts are
the usual ones of JAX libraries: images (N, H, W, C), kernels (H, W, in, out), matrices (in, out), heads (N, T, H, D).
Weights start as those of the torch model; nothing of torch is left in a step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch import nn

__all__ = ["MODELS", "arrays", "optimizer", "train_step"]

Arrays = dict[str, Array]  # by their names in the torch model

MOMENTUM, EPSILON = 0.1, 1e-5  # of the running statistics; of batch and layer norm


@dataclass
class Scope:
    """The weights and running statistics that a model reads by name, and the statistics that it replaces."""

    weights: Arrays
    statistics: Arrays
    updated: Arrays = field(default_factory=dict)

    def conv(self, name: str, x: Array, stride: int = 1, padding: int = 0) -> Array:
        """A convolution of images (N, H, W, C)."""
        y = lax.conv_general_dilated(
            x,
            self.weights[f"{name}.weight"],
            (stride, stride),
            [(padding, padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def batch_norm(self, name: str, x: Array) -> Array:
        """Normalization over all but the last dimension, as in training."""
        axes = tuple(range(x.ndim - 1))
        mean = x.mean(axes)
        variance = jnp.square(x).mean(axes) - jnp.square(mean)
        count = x.size // x.shape[-1]
        for key, new in (("running_mean", mean), ("running_var", variance * count / (count - 1))):
            old = self.statistics[f"{name}.{key}"]
            self.updated[f"{name}.{key}"] = old + MOMENTUM * (new - old)
        scale = self.weights[f"{name}.weight"] * lax.rsqrt(variance + EPSILON)
        return (x - mean) * scale + self.weights[f"{name}.bias"]

    def layer_norm(self, name: str, x: Array) -> Array:
        """Normalization over the last dimension."""
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean)
        return (x - mean) * lax.rsqrt(variance + EPSILON) * self.weights[f"{name}.weight"] + self.weights[
            f"{name}.bias"
        ]

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[f"{name}.weight"]
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y


Update = Callable[[Any, Any, Any], tuple[Any, Any]]
Model = Callable[[Scope, Array], Array]  # inputs as the benchmark's batches have them, to logits (N, classes)


def _max_pool(x: Array, window: int, stride: int, padding: int = 0) -> Array:
    pads = [(0, 0), (padding, padding), (padding, padding), (0, 0)]
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), pads)


def convnet(scope: Scope, images: Array) -> Array:
    """`models.ConvNet`."""
    x = images.transpose(0, 2, 3, 1)
    x = scope.batch_norm("bn1", jax.nn.relu(_max_pool(scope.conv("conv1", x), 2, 2)))
    x = scope.batch_norm("bn2", jax.nn.relu(_max_pool(scope.conv("conv2", x), 2, 2)))
    return scope.linear("fc2", jax.nn.relu(scope.linear("fc1", x.reshape(len(x), -1))))


def _shortcut(scope: Scope, name: str, x: Array, stride: int) -> Array:
    if f"{name}.shortcut.0.weight" not in scope.weights:
        return x
    return scope.batch_norm(f"{name}.shortcut.1", scope.conv(f"{name}.shortcut.0", x, stride))


def basic_block(scope: Scope, name: str, x: Array, stride: int) -> Array:
    y = jax.nn.relu(scope.batch_norm(f"{name}.bn1", scope.conv(f"{name}.conv1", x, stride, 1)))
    y = scope.batch_norm(f"{name}.bn2", scope.conv(f"{name}.conv2", y, 1, 1))
    return jax.nn.relu(y + _shortcut(scope, name, x, stride))


def bottleneck(scope: Scope, name: str, x: Array, stride: int) -> Array:
    y = jax.nn.relu(scope.batch_norm(f"{name}.bn1", scope.conv(f"{name}.conv1", x)))
    y = jax.nn.relu(scope.batch_norm(f"{name}.bn2", scope.conv(f"{name}.conv2", y, stride, 1)))
    y = scope.batch_norm(f"{name}.bn3", scope.conv(f"{name}.conv3", y))
    return jax.nn.relu(y + _shortcut(scope, name, x, stride))


def resnet(block: Callable[[Scope, str, Array, int], Array], depths: tuple[int, ...]) -> Model:
    """`models.resnet`."""

    def model(scope: Scope, images: Array) -> Array:
        x = images.transpose(0, 2, 3, 1)
        x = jax.nn.relu(scope.batch_norm("1", scope.conv("0", x, 2, 3)))
        x = _max_pool(x, 3, 2, 1)
        layer = 4
        for stage, depth in enumerate(depths):
            for index in range(depth):
                x = block(scope, str(layer), x, 2 if stage and not index else 1)
                layer += 1
        return scope.linear(str(layer + 2), x.mean((1, 2)))

    return model


def gpt(scope: Scope, tokens: Array, layers: int = 4, heads: int = 8) -> Array:
    """`models.Gpt`."""
    x = scope.weights["tokens.weight"][tokens] + scope.weights["positions.weight"][: tokens.shape[1]]
    rows, length, width = x.shape
    for name in (f"blocks.{layer}" for layer in range(layers)):
        qkv = scope.linear(f"{name}.attention.qkv", scope.layer_norm(f"{name}.norm1", x))
        q, k, v = (part.reshape(rows, length, heads, -1) for part in jnp.split(qkv, 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(rows, length, width)
        x = x + scope.linear(f"{name}.attention.out", y)
        y = scope.linear(f"{name}.mlp.0", scope.layer_norm(f"{name}.norm2", x))
        x = x + scope.linear(f"{name}.mlp.2", jax.nn.gelu(y, approximate=False))
    return scope.linear("head", scope.layer_norm("norm", x)).reshape(rows * length, -1)


MODELS: dict[str, Model] = {
    "mnist": convnet,
    "resnet18": resnet(basic_block, (2, 2, 2, 2)),
    "resnet50": resnet(bottleneck, (3, 4, 6, 3)),
    "gpt": gpt,
}


def arrays(model: nn.Module) -> tuple[Arrays, Arrays]:
    """The weights of a torch model in JAX's layouts, and its running statistics."""
    weights = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            array = parameter.detach().numpy()
            if isinstance(module, nn.Conv2d) and array.ndim == 4:
                array = array.transpose(2, 3, 1, 0)
            elif isinstance(module, nn.Linear) and array.ndim == 2:
                array = array.T
                if name == "fc1.weight":  # what it reads was flattened as (C, H, W), and is now as (H, W, C)
                    array = array.reshape(20, 4, 4, -1).transpose(1, 2, 0, 3).reshape(array.shape)
            weights[name] = array
    statistics = {name: b.numpy() for name, b in model.named_buffers() if not name.endswith("num_batches_tracked")}
    # Copies: what a step is given to write over must not be torch's memory.
    return jax.tree.map(lambda array: jnp.array(np.ascontiguousarray(array)), (weights, statistics))


def _sgd(weights: Arrays, grads: Arrays, state: Any, lr: float, momentum: float) -> tuple[Arrays, Any]:
    velocity = jax.tree.map(lambda v, g: momentum * v + g, state, grads)
    return jax.tree.map(lambda w, v: w - lr * v, weights, velocity), velocity


def _adamw(
    weights: Arrays, grads: Arrays, state: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[Arrays, Any]:
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: betas[0] * m + (1 - betas[0]) * g, first, grads)
    second = jax.tree.map(lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, second, grads)
    rate, root = lr / (1 - betas[0] ** count), jnp.sqrt(1 - betas[1] ** count)

    def new(w: Array, m: Array, v: Array) -> Array:
        return w * (1 - lr * weight_decay) - rate * m / (jnp.sqrt(v) / root + eps)

    return jax.tree.map(new, weights, first, second), (count, first, second)


def optimizer(made: "partial[torch.optim.Optimizer]", weights: Any) -> tuple[Update, Any]:
    """An optimizer's update, `(weights, grads, state) -> (weights, state)`, and the state to begin with.

    `made` is a `torch.optim.SGD` or `torch.optim.AdamW` with all the numbers that its update reads.
    """

    def zeros() -> Any:
        return jax.tree.map(jnp.zeros_like, weights)

    if made.func is torch.optim.SGD:
        return partial(_sgd, **made.keywords), zeros()
    if made.func is torch.optim.AdamW:
        return partial(_adamw, **made.keywords), (jnp.zeros((), jnp.int32), zeros(), zeros())
    raise NotImplementedError(f"{made.func} has no update here; SGD and AdamW have")


def train_step(
    model: Model, made: "partial[torch.optim.Optimizer]", weights: Arrays, statistics: Arrays
) -> tuple[Callable[..., Any], Any]:
    """A compiled `step(state, inputs, targets) -> (state, loss)`, and the state to begin with.

    The step writes over the arrays of the state that it is given.
    """
    update, moments = optimizer(made, weights)

    def loss(weights: Arrays, statistics: Arrays, inputs: Array, targets: Array) -> tuple[Array, Arrays]:
        scope = Scope(weights, statistics)
        logits = model(scope, inputs)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - chosen).mean(), scope.updated

    def step(state: Any, inputs: Array, targets: Array) -> tuple[Any, Array]:
        weights, statistics, moments = state
        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(weights, statistics, inputs, targets)
        weights, moments = update(weights, grads, moments)
        return (weights, statistics, moments), value

    return jax.jit(step, donate_argnums=0), (weights, statistics, moments)
