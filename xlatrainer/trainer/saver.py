"""`Saver`: when the state of a Trainer is saved during a `fit`, where, and from which checkpoint one goes on.

Owns the folder of checkpoints in `output_dir`, the thread that writes in the background, and what is told to the user
when a training is interrupted or fails. What a checkpoint holds is in `checkpoint`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.frequency import Frequency
from xlatrainer.trainer.checkpoint import Saved, as_saved, collect, collect_share, load_progress, load_state, read
from xlatrainer.trainer.checkpoints.background import BackgroundWriter
from xlatrainer.trainer.checkpoints.files import write_checkpoint, write_share
from xlatrainer.trainer.checkpoints.folder import CheckpointFolder
from xlatrainer.trainer.checkpoints.places import place_of
from xlatrainer.trainer.checkpoints.together import together
from xlatrainer.trainer.interruption import Interruption
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.progress import Progress
from xlatrainer.trainer.weight_files import read_weight_files, write_weight_file
from xlatrainer.trainer.weights import Loaded, NameMap, load_into, model_state, renamed

if TYPE_CHECKING:
    from xlatrainer.callbacks.callback_list import CallbackList
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["SaveFrequency", "Saver"]

SaveFrequency = int | str | timedelta

_log = logging.getLogger("xlatrainer.checkpoints")


class Saver:
    """Saves and resumes `trainer`; the arguments are those of `Trainer`.

    Attributes:
        progress: The place in the `fit` that is going on, or in the latest one if it was interrupted.
        resumed_from: The checkpoint that the current `fit` goes on from; None if it begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        output_dir: str | os.PathLike[str] | None,
        save_freq: SaveFrequency,
        max_to_keep: int | None,
        async_save: bool,
    ) -> None:
        self._trainer = trainer
        self._frequency = Frequency(save_freq)
        self._frequency.refuse_time(trainer.strategy.process[1])
        self._in_background = async_save
        self._folder: CheckpointFolder | None = None
        if output_dir is not None:
            self._folder = CheckpointFolder(str(place_of(output_dir).child("checkpoints")), max_to_keep)
        self._writer = BackgroundWriter()
        self._run = uuid.uuid4().hex
        self._unreported: list[str] = []  # written in the background, and no callback was told
        self._newest: str | None = None
        self._hooks: CallbackList | None = None
        self._saved_at: tuple[int, int, int | None] | None = None
        self._first_step = 0
        self._warned_of_nan = False
        self.progress: Progress | None = None
        self.resumed_from: str | None = None

    # saving

    def save(self, path: str | os.PathLike[str], *, in_background: bool) -> None:
        """Save to `path`; see `Trainer.save`."""
        self.wait()
        write = self._collected(path)
        shown = os.fspath(path)
        if not in_background:
            write()
            self._written(shown)
            return
        self._writer.start(write)
        self._unreported.append(shown)

    def _collected(self, path: str | os.PathLike[str]) -> Callable[[], None]:
        """Keep the state as it is now; returns a function that writes it to `path`, alone or with other processes."""
        team = self._trainer.strategy.team
        if team is None:
            content = collect(self._trainer, self.progress, self._run)
            return lambda: write_checkpoint(path, content())
        share = collect_share(self._trainer, self.progress, self._run, team)
        return lambda: write_share(path, share(), team)

    def wait(self) -> None:
        """Wait until what is written in the background is on the disk; raise its error if it had one."""
        unreported, self._unreported = self._unreported, []
        self._writer.wait()
        for path in unreported:
            self._written(path)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, or a file of weights, that was saved before."""
        self.wait()
        team, place = self._trainer.strategy.team, place_of(path)
        if team is not None and team.index:
            return  # the first process deletes
        if place.holds_checkpoint():
            place.remove()
        else:
            place.remove_file()

    def _written(self, path: str) -> None:
        self._newest = path
        if self._hooks is not None:
            self._hooks.saved(path)

    def _save_here(self, *, in_background: bool) -> None:
        """Save into the folder of checkpoints under the number of the step, unless that was done."""
        step, place = self._trainer.step, self._place()
        if self._folder is None or place == self._saved_at:
            return
        folder = self._folder
        self.wait()
        path = folder.path_of(step)
        save, team = self._collected(path), self._trainer.strategy.team

        def write() -> None:
            save()
            if team is None or team.index == 0:
                folder.clean(self._run)

        if in_background:
            self._writer.start(write)
            self._unreported.append(path)
        else:
            write()
            self._written(path)
        self._saved_at = place

    def _place(self) -> tuple[int, int, int | None]:
        """What tells two moments of a training apart."""
        return self._trainer.step, self._trainer.epoch, None if self.progress is None else self.progress.done

    # what the loop calls

    def begin_fit(self, progress: Progress, resumed: Saved | None, hooks: CallbackList) -> None:
        """A `fit` begins, with these callbacks."""
        self._hooks = hooks
        self.progress = progress
        self.resumed_from = None if resumed is None else resumed.path
        self._saved_at = None
        self._first_step = self._trainer.step
        self._frequency.begin(self._trainer.step)
        self._warned_of_nan = False

    def after_batch(self) -> None:
        """A training step is done, and all callbacks know."""
        if not self._frequency.is_epoch and self._frequency.is_due(self._trainer.step):
            self._save_here(in_background=self._in_background)

    def after_epoch(self, epoch: int, logs: Logs) -> None:
        """An epoch is done, and all callbacks know."""
        if self._frequency.is_epoch:
            self._save_here(in_background=self._in_background)
        warns = not (self._warned_of_nan or self._trainer.stop_training)
        if warns and "loss" in logs and logs.is_ready and math.isnan(logs["loss"]):
            self._warned_of_nan = True
            message = f"the loss of epoch {epoch} is nan, and the training goes on: TerminateOnNaN() would stop it"
            warnings.warn(f"{message}. {self._kept()}", RuntimeWarning, stacklevel=2)

    def end_fit(self, interruption: Interruption) -> None:
        """The training has come to its end, or was interrupted: save what is not saved yet."""
        self._save_here(in_background=False)
        self.wait()
        if interruption.is_preemption and self._hooks is not None:
            self._hooks.call("on_preempt")
        if self.progress is not None and self.progress.done is not None:
            self.progress.freeze()
        else:
            self.progress = None

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Say on an exception what is kept; if the data failed, save the steps that are done."""
        try:
            yield
        except BaseException as error:
            self._end_writer(error)
            if isinstance(error, Exception) and self.progress is not None:
                self._note(error, self.progress)
            self.progress = None
            raise

    def _note(self, error: Exception, progress: Progress) -> None:
        trainer = self._trainer
        where = f"after step {trainer.step}"
        if progress.done is not None:
            where = (
                f"in epoch {trainer.epoch} (counted from 0) after {progress.done} of its batches, step {trainer.step}"
            )
        error.add_note(f"the training ended {where}")
        if progress.drawing and trainer.step > self._first_step:
            try:
                self._save_here(in_background=False)
            except Exception as second:  # noqa: BLE001 - noted on the exception that is raised anyway
                error.add_note(f"and what was trained so far could not be saved: {second}")
        error.add_note(self._kept())

    def _kept(self) -> str:
        if self._newest is not None:
            return f"The newest checkpoint is {self._newest}"
        return "No checkpoint was written" + (
            "" if self._folder is not None else ": Trainer(output_dir=...) writes them"
        )

    def _end_writer(self, error: BaseException) -> None:
        try:
            self.wait()
        except Exception as second:  # noqa: BLE001 - noted on the exception that is raised anyway
            if second is not error:
                error.add_note(f"and a checkpoint was not written: {second}")

    # resuming

    def find(self, resume_from: str | os.PathLike[str] | None, callbacks: Sequence[Callback]) -> Saved | None:
        """The checkpoint to go on from; None to begin anew. The training takes over its name.

        Args:
            resume_from: As for `fit`.
            callbacks: May name one, if `resume_from` is None.
        """
        if resume_from is None:
            offered = [callback.resume_from() for callback in callbacks if isinstance(callback, Callback)]
            resume_from = next((path for path in offered if path is not None and _is_there(path)), None)
        if resume_from is None:
            return None
        if resume_from != "last":
            saved = read(resume_from, self._trainer.strategy.team)
            if self._folder is not None:
                self._folder.protected = saved.path
        else:
            if self._folder is None:
                raise ValueError('resume_from="last" needs Trainer(output_dir=...), where the checkpoints are')
            newest = self._folder.newest(self._trainer.strategy.team)
            if newest is None:
                _log.info("there is no checkpoint to resume from: the training begins")
                return None
            saved = as_saved(*newest)
        self._run = saved.run or self._run
        self._newest = saved.path
        _log.info("resuming from %s", saved.path)
        return saved

    def load(self, path: str | os.PathLike[str], *, strict: bool, names: NameMap | None) -> Loaded:
        """Load model, optimizers and counters; see `Trainer.load`."""
        self.progress = None
        return load_state(
            self._trainer, read(path, self._trainer.strategy.team), strict=strict, names=names, everything=False
        )

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Save the weights alone; see `Trainer.save_weights`."""
        weights, tied, _ = model_state(self._trainer.model)
        team = self._trainer.strategy.team
        named = dict(zip(weights, self._trainer.strategy.fetch(list(weights.values())), strict=True))
        if team is None:
            write_weight_file(path, named, tied)
            return

        def write() -> None:
            if team.index == 0:
                write_weight_file(path, named, tied)

        together(team, write, f"the weights {os.fspath(path)} could not be written")

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool, names: NameMap | None) -> Loaded:
        """Load weights alone; see `Trainer.load_weights`."""
        weights, tied = read_weight_files(path)
        ties = {} if names is not None else tied
        loaded = load_into(self._trainer.model, renamed(weights, names), ties, strict=strict, where=os.fspath(path))
        self._trainer.strategy.end_step()
        return loaded

    def resume(self, saved: Saved, progress: Progress) -> None:
        """Set everything to what it was; called once the hooks that had been called before it was saved were called."""
        load_state(self._trainer, saved, everything=True)
        load_progress(saved, progress)
        if self._folder is not None and saved.path == self._folder.path_of(self._trainer.step):
            self._saved_at = self._place()  # nothing is to be saved before the next step
        if self._hooks is not None:
            self._hooks.loaded(saved.path)


def _is_there(path: str | os.PathLike[str]) -> bool:
    try:
        place_of(path).manifest()
    except FileNotFoundError:
        return False
    return True
