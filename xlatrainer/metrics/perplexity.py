"""`Perplexity`: how many tokens a language model hesitates between."""

import torch.nn.functional as F
from torch import Tensor

from xlatrainer.metrics.accuracy import is_class_index
from xlatrainer.metrics.mean import Mean
from xlatrainer.metrics.weights import full_weight, weighted_sum

__all__ = ["Perplexity"]


class Perplexity(Mean):
    """The exponential of the mean cross-entropy over all tokens of all batches.

    Args:
        shift: For scores (N, L, C) of tokens (N, L), classes last, as the models of `transformers` give them. True:
            each position predicts the token after it (a causal model, whose labels are its inputs); False: the token at
            its place. Default None, which is an error for such scores: it cannot be told from the values. Scores
            (N, C) or (N, C, ...) with targets (N, ...), as `cross_entropy` takes them, need none.
        ignore_index: Targets that do not count; default -100.
        name: Its name in the logs; default "perplexity".

    Example:
        >>> import torch
        >>> perplexity = Perplexity()
        >>> perplexity.update(torch.zeros(3, 7), torch.tensor([0, 6, 2]))
        >>> perplexity.compute()
        tensor(7.0000)
    """

    def __init__(self, shift: bool | None = None, ignore_index: int = -100, name: str = "perplexity") -> None:
        super().__init__(name)
        self._shift = shift
        self._ignored = ignore_index

    def update(  # type: ignore[override]
        self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        scores, target = self._in_order(prediction, target)
        losses = F.cross_entropy(scores.detach().float(), target.long(), ignore_index=self._ignored, reduction="none")
        counts = target != self._ignored
        if sample_weight is not None:
            of_tokens = self._shift and sample_weight.dim() > 1
            counts = counts * full_weight(sample_weight[:, 1:] if of_tokens else sample_weight, counts)
        self._add(*weighted_sum(losses, counts))

    def compute(self) -> Tensor:
        """The figure, shape (), float32; NaN before the first `update`."""
        return super().compute().exp()

    def _in_order(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (N, C, ...) and their targets (N, ...)."""
        if prediction.dim() == 3 and prediction.shape[:2] == target.shape and self._shift is not None:
            if self._shift:
                prediction, target = prediction[:, :-1], target[:, 1:]
            return prediction.transpose(1, 2), target
        is_ambiguous = prediction.dim() > 2 and prediction.shape[:-1] == target.shape
        if self._shift is None and is_class_index(prediction, target) and not is_ambiguous:
            return prediction, target
        raise ValueError(
            f"{self.name}: predictions of shape {tuple(prediction.shape)} and {target.dtype} targets of shape "
            f"{tuple(target.shape)} do not go together. Accepted: scores (N, C, ...) with integer targets (N, ...); "
            f"scores (N, L, C) with targets (N, L) and Perplexity(shift=True) for a causal model whose labels are its "
            f"inputs, Perplexity(shift=False) otherwise"
        )
