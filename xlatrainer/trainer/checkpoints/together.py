"""`together`: what several processes do at once, and an error of one of them is an error of all."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from xlatrainer.distributed.team import Team
from xlatrainer.errors import CheckpointError

__all__ = ["together"]

_T = TypeVar("_T")


def together(team: Team, job: Callable[[], _T], failed: str) -> list[_T]:
    """Every process's result of its `job`, in their order, once all are done.

    Args:
        team: The processes, all of which call this.
        job: Returns what JSON can hold.
        failed: What an error means, for the message.

    Raises:
        CheckpointError: In all processes, if the job of one fails; the message names it. Where it failed, the cause is
            the job's own error.
    """
    own: Exception | None = None
    answer: dict[str, Any] = {}
    try:
        answer["result"] = job()
    except Exception as error:  # noqa: BLE001 - raised below, in all processes
        own = error
        answer["error"] = (
            f"{error}" if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {error}"
        )
    answers = [json.loads(text) for text in team.gather(json.dumps(answer))]
    errors = [f"process {i}: {answer['error']}" for i, answer in enumerate(answers) if "error" in answer]
    if errors:
        raise CheckpointError(f"{failed}: {'; '.join(errors)}") from own
    return [answer["result"] for answer in answers]
