"""Train and eval mode within a block."""

from torch import nn

from xlatrainer.trainer.modes import evaluating, training


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_eval_mode_for_all_and_back_for_each() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = flags(model)
    with evaluating(model):
        assert not any(flags(model))
    assert flags(model) == before


def test_train_mode_respects_parts_that_are_not() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with training(model):
        assert flags(model) == [True, True, False]
    model.eval()
    with training(model):
        assert flags(model) == [True, True, True]
    assert not any(flags(model))


def test_modules_that_go_or_come_meanwhile() -> None:
    model = nn.Sequential(nn.Dropout())
    with evaluating(model):
        model.append(nn.Dropout())
        model[0] = nn.Identity()
    assert model.training
