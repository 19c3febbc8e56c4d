"""The History of a fit, begun anew by the next."""

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
