"""Hooks given as functions; a misspelt one is an error."""

import pytest

from xlatrainer.callbacks.lambda_callback import LambdaCallback


def test_unknown_hooks_are_listed() -> None:
    with pytest.raises(TypeError, match=r"got 'on_epoch_ends', which is no hook; the hooks are \['on_batch_begin'"):
        LambdaCallback(on_epoch_ends=print)


def test_values_must_be_callable() -> None:
    with pytest.raises(TypeError, match="needs a function for on_epoch_end, got 3"):
        LambdaCallback(on_epoch_end=3)  # type: ignore[arg-type]
