"""A precision policy over several devices: what they hold and multiply is bfloat16, as on one."""

import re

import jax.numpy as jnp
import pytest

import xlatrainer as xla
from tests.strategies.models import batches, trained
from xlatrainer.backend.tensor import storage_data


@pytest.mark.parametrize(("strategy", "part"), [("ddp", (64, 64)), ("fsdp", (8, 64))])
def test_a_policy_of_bfloat16(strategy: str, part: tuple[int, int]) -> None:
    data = batches("bigram", 6)
    with xla.precision("bf16"):
        _, expected = trained("bigram", "single", data)
        trainer, losses = trained("bigram", strategy, data)
        program = xla.debug.hlo(trainer.model(trainer.strategy.to_device(data[0][0])))
    assert losses == pytest.approx(expected, rel=5e-3)
    held = storage_data(trainer.model.head.weight).value.buffer
    assert held.dtype == jnp.bfloat16
    assert {shard.data.shape for shard in held.addressable_shards} == {part}
    product = re.search(r" = f32\[256,64\]\S* custom-call\((\S+), (\S+)\), .*CustomSPMDPartitioning", program)
    assert product is not None
    for factor in product.groups():
        assert f"  {factor} = bf16[" in program
