"""torch's own database of operators, with samples of how each is called. Everything else imports it from here."""

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's test helpers speak of optional packages that we do not use
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["OPERATORS", "OpInfo", "SampleInput", "full_name", "tensors"]

OPERATORS: list[OpInfo] = list(op_db)

# Whoever asks for samples is looked for through the whole stack, in case it is a unittest that leaves some out. Here
# there is none, and the search takes ten times as long as making the samples.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
