"""The History of a fit, begun anew by the next."""

import sys
from collections.abc import Iterator

import matplotlib
import pytest

from tests.trainer.helpers import ON_CPU, class_batches, classifier
from xlatrainer.callbacks.history import History
from xlatrainer.trainer.trainer import Trainer


def test_values_are_floats_by_epoch() -> None:
    trainer = Trainer(classifier(), "sgd", metrics=["accuracy"], strategy=ON_CPU)
    history = trainer.fit(class_batches(), epochs=3, validation_data=class_batches(), verbose=0)
    assert list(history.history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert all(type(value) is float for values in history.history.values() for value in values)
    assert {len(values) for values in history.history.values()} == {3}


def test_a_second_fit_begins_anew() -> None:
    history = History()
    trainer = Trainer(classifier(), "sgd", callbacks=[history], strategy=ON_CPU)
    trainer.fit(class_batches(), epochs=3, verbose=0)
    trainer.fit(class_batches(), epochs=1, verbose=0)
    assert (history.epoch, len(history.history["loss"])) == ([0], 1)


@pytest.fixture
def pyplot() -> Iterator[object]:
    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")
    matplotlib.use(before)


def trained() -> History:
    """Five epochs, with a validation every other one."""
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    return trainer.fit(class_batches(), epochs=5, validation_data=class_batches(), validation_freq=2, verbose=0)


def test_to_pandas() -> None:
    history = trained()
    frame = history.to_pandas()
    assert list(frame.columns) == ["loss", "val_loss"]
    assert frame.index.name == "epoch"
    assert list(frame.index) == [0, 1, 2, 3, 4]
    assert frame["loss"].tolist() == history.history["loss"]
    assert frame["val_loss"].dropna().to_dict() == dict(zip([1, 3], history.history["val_loss"], strict=True))
    assert History().to_pandas().empty


def test_plot(pyplot: object) -> None:
    history = trained()
    figure = history.plot()
    (axis,) = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axis.get_lines()}
    assert lines["training"] == [[epoch, value] for epoch, value in enumerate(history.history["loss"])]
    assert [x for x, _ in lines["validation"]] == [1, 3]
    assert axis.get_title() == "loss"
    with pytest.raises(ValueError, match=r"nothing to plot for \['mae'\]; the names are \['loss'\]"):
        history.plot(["mae"])
    with pytest.raises(ValueError, match="nothing to plot for an empty history"):
        History().plot()


@pytest.mark.parametrize(
    ("module", "method", "extra"), [("pandas", "to_pandas", "pandas"), ("matplotlib.pyplot", "plot", "plot")]
)
def test_what_is_not_installed_is_said(module: str, method: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history = trained()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"History.{method} needs .* pip install .xlatrainer\[{extra}\]"):
        getattr(history, method)()
