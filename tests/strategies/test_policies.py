"""Which parameters are sharded, along which dimension: policies, plans, and what is wrong with them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.models import GPT, Block
from xlatrainer.distributed import Mesh, get_sharding_spec
from xlatrainer.strategies import (
    DDPStrategy,
    FSDPStrategy,
    HSDPStrategy,
    MeshStrategy,
    Strategy,
    module_wrap_policy,
    size_based_wrap_policy,
)


def specs(strategy: Strategy, model: nn.Module | None = None) -> dict[str, tuple[Any, ...]]:
    """How the parameters lie after the setup: those that are not whole."""
    model = strategy.setup(GPT(width=16, vocabulary=24, blocks=2) if model is None else model)
    found = {name: get_sharding_spec(parameter) for name, parameter in model.named_parameters()}
    return {name: spec for name, spec in found.items() if spec is not None}


def test_by_default_all_matrices_along_their_largest_dimension_that_fits() -> None:
    found = specs(FSDPStrategy())
    assert found["token.weight"] == ("fsdp", None)  # 24 x 16
    assert found["blocks.0.down.weight"] == (None, "fsdp")  # 16 x 64
    assert len(found) == 2 + 2 * 4
    odd = nn.Sequential(nn.Linear(7, 16, bias=False), nn.Linear(16, 9, bias=False), nn.Linear(9, 7, bias=False))
    assert specs(FSDPStrategy(), odd) == {"0.weight": ("fsdp", None), "1.weight": (None, "fsdp")}  # 9 x 7 stays whole


@pytest.mark.parametrize("policy", [{Block}, [Block], module_wrap_policy({Block})], ids=["set", "list", "policy"])
def test_by_classes_of_modules(policy: Any) -> None:
    found = specs(FSDPStrategy(2, auto_wrap_policy=policy))
    assert len(found) == 2 * 4
    assert all(name.startswith("blocks.") for name in found)


def test_the_class_of_the_model_itself_and_of_a_layer() -> None:
    assert len(specs(FSDPStrategy(2, auto_wrap_policy={GPT}))) == 10
    assert set(specs(FSDPStrategy(2, auto_wrap_policy={nn.Embedding}))) == {"token.weight", "position.weight"}


def test_by_size() -> None:
    found = specs(FSDPStrategy(2, auto_wrap_policy=size_based_wrap_policy(1000)))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found} == {"up", "down"}  # 16 x 64


def test_by_a_function_of_ones_own() -> None:
    seen = []

    def policy(module: nn.Module, name: str, parameter: Tensor) -> int | str | None:
        seen.append((type(module).__name__, name))
        if name == "bias":
            return 0
        return "largest" if isinstance(module, nn.Embedding) else None

    found = specs(FSDPStrategy(auto_wrap_policy=policy))
    assert ("Linear", "bias") in seen
    assert ("Embedding", "weight") in seen
    assert found["blocks.1.up.bias"] == ("fsdp",)
    assert found["token.weight"] == ("fsdp", None)
    assert "blocks.1.up.weight" not in found


@pytest.mark.parametrize("wrong", [2, -1, "rows", 1.0, True])
def test_what_a_policy_must_not_give(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the policy gave .* for 0.weight of shape \(8, 8\): accepted are a dimension"
    ):
        FSDPStrategy(auto_wrap_policy=lambda *of: wrong).setup(nn.Sequential(nn.Linear(8, 8)))


def test_a_dimension_that_the_devices_do_not_divide_names_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 9))
    with pytest.raises(
        ValueError, match=r"the parameter 0.weight: dimension 0 of shape \(9, 8\) cannot be split into 8"
    ):
        FSDPStrategy(auto_wrap_policy=lambda *of: 0).setup(model)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())  # nothing was placed


def test_zero_by_number() -> None:
    assert specs(FSDPStrategy(zero=2)) == specs(FSDPStrategy(zero=1)) == {}
    with pytest.raises(ValueError, match=r"zero=4: accepted are 1 \(optimizer state\), 2 \(and gradients\), 3"):
        FSDPStrategy(zero=4)


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy])
def test_devices_that_there_are_not(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"devices=9, and there are 8; on the CPU, CPU_NUM_DEVICES=N makes N"):
        strategy(9)
    with pytest.raises(ValueError, match="devices=0, and there are 8"):
        strategy(0)
    with pytest.raises(ValueError, match=r"there are the devices 0 to 7 .*, got \[8\]"):
        strategy([0, 8])
    with pytest.raises(ValueError, match="devices is empty"):
        strategy([])


def test_some_devices() -> None:
    strategy = DDPStrategy([5, 2])
    strategy.setup(nn.Linear(2, 2))
    assert [device.id for device in strategy.home.devices] == [5, 2]
    assert strategy.batch_parts == 2


def test_replicas() -> None:
    strategy = HSDPStrategy(4)
    assert dict(strategy.mesh.shape()) == {"data": 4, "fsdp": 2}
    assert strategy.batch_parts == 8
    for wrong in (3, 0, 16):
        with pytest.raises(ValueError, match=f"8 devices cannot be split into {wrong} equal groups of replicas"):
            HSDPStrategy(wrong)


def mesh_strategy(plan: dict[str, Any], shape: tuple[int, int] = (4, 2)) -> MeshStrategy:
    return MeshStrategy(Mesh(range(8), shape, ("data", "model")), plan)


def test_a_plan() -> None:
    plan = {"blocks.*.up": ("model", None), "*.qkv.bias": ("model",), "token": (None, "model")}
    found = specs(mesh_strategy(plan))
    assert found == {
        "token.weight": (None, "model"),
        **{f"blocks.{i}.up.weight": ("model", None) for i in range(2)},
        **{f"blocks.{i}.qkv.bias": ("model",) for i in range(2)},
    }


def test_the_first_pattern_that_fits_counts() -> None:
    found = specs(mesh_strategy({"blocks.1.up": (None, "model"), "blocks.*.up": ("model", None)}))
    assert found == {"blocks.0.up.weight": ("model", None), "blocks.1.up.weight": (None, "model")}


def test_batches_are_split_over_the_data_axes_alone() -> None:
    assert mesh_strategy({}).batch_parts == 4
    alone = MeshStrategy(Mesh(range(8), (8,), ("model",)), {})
    assert alone.batch_parts == 1
    assert alone.to_device(torch.zeros(3, 2)).shape == (3, 2)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            {"layers.*": ("model", None)},
            "the plan's 'layers.*' with a spec of 2 dimensions fits no parameter; there are token",
        ),
        ({"blocks.*.norm1": ("model", None)}, "the plan's 'blocks.*.norm1' with a spec of 2 dimensions fits no"),
        (
            {"token": ("rows", None)},
            "the parameter token.weight: partition_spec names the axis 'rows' for dimension 0; the",
        ),
        ({"token.weight": ("model",)}, "the parameter token.weight: partition_spec ('model',) has 1 entries"),
        ({"token": ("model", "model")}, "the parameter token.weight: partition_spec ('model', 'model') uses the axis"),
    ],
    ids=["no parameter", "no such dimensions", "axis", "rank", "twice"],
)
def test_a_plan_that_does_not_fit(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        mesh_strategy(plan).setup(GPT(width=16, blocks=1))


def test_a_plan_that_devices_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"the parameter 0.weight: dimension 0 of shape \(9, 8\) cannot be split into 2"
    ):
        mesh_strategy({"0": ("model", None)}).setup(nn.Sequential(nn.Linear(8, 9)))
