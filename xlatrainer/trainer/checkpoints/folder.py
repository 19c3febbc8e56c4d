"""A folder of checkpoints of one training: their names, which one is the newest, and which may go.

Deletes only checkpoints of the training that it belongs to (the name of the run is in each of them), never the one that
the training was explicitly resumed from, and never the newest one whose weights are all finite.
"""

import os
import re
import warnings

from xlatrainer.distributed.team import Team
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.files import Content, read_checkpoint, read_manifest
from xlatrainer.trainer.checkpoints.places import place_of
from xlatrainer.trainer.checkpoints.together import together

__all__ = ["CheckpointFolder"]

_NAME = re.compile(r"step_(\d{8,})")


class CheckpointFolder:
    """Checkpoints named `step_00000100` in one folder.

    Args:
        path: The folder or URL; it is made with the first checkpoint.
        max_to_keep: How many to keep; None keeps all.

    Raises:
        ValueError: If `max_to_keep` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], max_to_keep: int | None = None) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None to keep all; got {max_to_keep}")
        self._place = place_of(path)
        self._max_to_keep = max_to_keep
        self.protected: str | None = None

    def path_of(self, step: int) -> str:
        """Where the checkpoint of this step is."""
        return str(self._place.child(f"step_{step:08d}"))

    def newest(self, team: Team | None = None) -> tuple[str, Content] | None:
        """Path and contents of the newest checkpoint that is whole, all of it checked; None if there is none.

        A damaged one is left where it is, with a warning that says what is wrong with it.

        Args:
            team: Processes that all ask, and get the same one. Default None: this one alone.
        """
        damaged = []
        steps = [step for _, step in sorted(self._saved(), reverse=True)]
        if team is not None:  # what the first one sees counts
            steps = together(team, lambda: steps, f"the checkpoints in {self._place} could not be listed")[0]
        for step in steps:
            path = self.path_of(step)
            try:
                content = read_checkpoint(path, team)
            except (CheckpointError, FileNotFoundError) as error:  # the latter: its training has deleted it meanwhile
                damaged.append(str(error))
                continue
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}. Going on with {path}, the newest whole one", stacklevel=2)
            return path, content
        if damaged:
            raise CheckpointError(f"there is no whole checkpoint in {self._place}: {'; '.join(damaged)}")
        return None

    def clean(self, run: str) -> None:
        """Delete what is beyond `max_to_keep`, of the training `run` only, and what killed processes left half-written.

        Args:
            run: The name of the training.
        """
        self._place.clean()
        if self._max_to_keep is None:
            return
        own: list[tuple[float, int, bool]] = []
        for saved, step in self._saved():
            try:
                about = read_manifest(self.path_of(step))
            except (CheckpointError, FileNotFoundError):
                continue  # nobody knows whose it is
            if about.get("run") == run:
                own.append((saved, step, bool(about.get("finite"))))
        own.sort(reverse=True)
        last_finite = next((step for _, step, finite in own if finite), None)
        for _, step, _ in own[self._max_to_keep :]:
            path = self.path_of(step)
            if step != last_finite and path != self.protected:
                place_of(path).remove()

    def _saved(self) -> list[tuple[float, int]]:
        """When each checkpoint was saved, and its step; one whose manifest is damaged counts as the newest."""
        found = []
        for name in self._place.children():
            match = _NAME.fullmatch(name)
            if match is None or not self._place.child(name).holds_checkpoint():
                continue
            try:
                saved = float(read_manifest(str(self._place.child(name)))["saved"])
            except CheckpointError:
                saved = float("inf")
            found.append((saved, int(match[1])))
        return found
