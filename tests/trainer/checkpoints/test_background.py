"""Jobs in the background: one at a time, and no error is lost."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from xlatrainer.trainer.checkpoints import background
from xlatrainer.trainer.checkpoints.background import BackgroundWriter


def test_one_after_the_other_and_waited_for() -> None:
    writer = BackgroundWriter()
    done: list[int] = []
    may_end = threading.Event()
    writer.start(lambda: (may_end.wait(10), done.append(1)))  # type: ignore[func-returns-value]
    assert done == []
    may_end.set()
    writer.start(lambda: done.append(2))
    assert done[0] == 1
    writer.wait()
    writer.wait()
    assert done == [1, 2]


def test_an_error_is_raised_once_by_the_next_call() -> None:
    writer = BackgroundWriter()

    def fail() -> None:
        raise OSError("full")

    writer.start(fail)
    with pytest.raises(OSError, match="full") as caught:
        writer.wait()
    assert caught.value.__notes__ == ["raised by the thread that writes checkpoints in the background"]
    assert caught.traceback[-1].name == "fail"
    writer.wait()
    writer.start(fail)
    with pytest.raises(OSError, match="full"):
        writer.start(lambda: None)


def test_a_process_that_ends_finishes_the_write_and_reports_the_error(tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys, time, pathlib\n"
        "spec = importlib.util.spec_from_file_location('background', sys.argv[2])\n"  # alone, which is fast
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "first, second = module.BackgroundWriter(), module.BackgroundWriter()\n"
        "first.start(lambda: (time.sleep(0.3), pathlib.Path(sys.argv[1]).write_text('whole')))\n"
        "second.start(lambda: 1 / 0)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "written"), background.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (tmp_path / "written").read_text() == "whole"
    assert "a checkpoint was not written: division by zero" in ended.stderr
    assert ended.returncode == 0
