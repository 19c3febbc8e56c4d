"""What schemas say, and that every operator's kernel can be told from them."""

from collections import defaultdict

import torch

from xlatrainer.backend._private_api import all_overloads, has_kernel
from xlatrainer.backend.lowerings.registry import registered
from xlatrainer.backend.schema import (
    functional_twin,
    gives_results,
    lifted_positions,
    makes_tensor,
    plain_positions,
    signature,
)

aten = torch.ops.aten


def test_signatures() -> None:
    assert signature(aten.add.Tensor).functional
    assert signature(aten.add_.Tensor).written == ("self",)
    assert not signature(aten.add_.Tensor).out
    assert signature(aten.add.out).out
    assert signature(aten.max.dim_max).written == ("max", "max_values")
    assert signature(aten._foreach_add_.List).written == ("self",)


def test_twins() -> None:
    assert functional_twin(aten.add_.Tensor) is aten.add.Tensor
    assert functional_twin(aten.add.out) is aten.add.Tensor
    assert functional_twin(aten.max.dim_max) is aten.max.dim
    assert functional_twin(aten.normal_.default) is aten.normal_functional.default
    assert functional_twin(aten.bernoulli_.float) is aten.bernoulli.p
    assert functional_twin(aten._foreach_mul_.Scalar) is aten._foreach_mul.Scalar
    assert functional_twin(aten.copy_.default) is aten.copy.default


def test_twins_of_factories_and_of_what_gives_results_too() -> None:
    assert functional_twin(aten.arange.out) is aten.arange.default
    assert functional_twin(aten.arange.start_out) is aten.arange.start_step
    assert functional_twin(aten._native_batch_norm_legit.default) is aten._native_batch_norm_legit_functional.default
    assert gives_results(aten._native_batch_norm_legit.default)
    assert not gives_results(aten.add_.Tensor)
    assert makes_tensor(aten.eye.m)
    assert not makes_tensor(aten.sum.dim_IntList)


def test_nearly_all_in_place_and_out_forms_have_a_twin() -> None:
    in_place = [o for o in all_overloads() if (s := signature(o)).written and not s.out]
    out = [o for o in all_overloads() if signature(o).out]
    assert sum(functional_twin(o) is not None for o in in_place) > 0.85 * len(in_place)
    assert sum(functional_twin(o) is not None for o in out) > 0.85 * len(out)


def test_numbers_that_are_lifted() -> None:
    assert lifted_positions(aten.add.Tensor, frozenset()) >= {1, 2, "alpha", "other"}
    assert "dim" not in lifted_positions(aten.sum.dim_IntList, frozenset())
    assert "exponent" not in lifted_positions(aten.pow.Tensor_Scalar, frozenset({"exponent"}))


def test_plain_arguments_have_one_type_and_are_never_lifted() -> None:
    assert plain_positions(aten.convolution.default) == {3, 4, 5, 6, 7, 8}
    assert plain_positions(aten.add.Tensor) == frozenset()
    assert plain_positions(aten.index.Tensor) == frozenset()
    for lowering in registered().values():
        overload = lowering.overload
        assert not plain_positions(overload) & lifted_positions(overload, frozenset()), lowering.name


def test_lowerings_are_of_functional_operators_that_autograd_does_not_take_apart() -> None:
    """A lowering of a composite operator would hide the operators that torch differentiates."""
    for name, lowering in registered().items():
        overload = lowering.overload
        assert signature(overload).functional, name
        composite = has_kernel(overload, "CompositeImplicitAutograd") and not has_kernel(overload, "CPU")
        assert not composite, name


def test_static_and_mutated_names_are_of_the_schema() -> None:
    names = defaultdict(
        set
    )  # of all overloads that one function serves, of which each may have some of the static arguments
    for lowering in registered().values():
        names[lowering.function].update(argument.name for argument in lowering.overload._schema.arguments)
    for name, lowering in registered().items():
        assert not lowering.static or lowering.static & names[lowering.function], name
        assert set(lowering.mutates) <= names[lowering.function], name
