"""`python -m xlatrainer`: each command does what it says, with the right exit code."""

import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from xlatrainer.cli.debug_run import _environment
from xlatrainer.cli.dump_stacks import grouped
from xlatrainer.cli.main import COMMANDS, main

CLI = [sys.executable, "-m", "xlatrainer"]
SCRIPT = """
import sys, torch, xlatrainer as xla
for step in range(3):
    torch.ones(3).to("xla").exp()
    y = torch.ones(3).to("xla").sin()
    xla.sync()
print("done")
print("a word", file=sys.stderr)
sys.exit({code})
"""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"] if command is None else [command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m xlatrainer")
    if command is None:
        assert all(name in shown for name in COMMANDS)


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["dump-stacks", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAINER_REPLAY", "off")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for part in ("python: ", "torch: 2.", "jax: 0.", "devices: CPU:0", "memory: ", "setting XLATRAINER_REPLAY: off"):
        assert part in shown


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as packed:
        return {name.removeprefix("xlatrainer-debug/") for name in packed.getnames()}


def content(archive: Path, name: str) -> str:
    with tarfile.open(archive) as packed:
        file = packed.extractfile(f"xlatrainer-debug/{name}")
        assert file is not None
        return file.read().decode()


FILES = {"analysis.txt", "command.txt", "environment.txt", "graphs.0", "info.txt", "metrics.txt"}
FILES |= {"stdout.txt", "stderr.txt"}


@pytest.mark.multiprocess
def test_debug_run(tmp_path: Path) -> None:
    script, archive = tmp_path / "script.py", tmp_path / "report.tar.gz"
    script.write_text(SCRIPT.format(code=3))
    environment = {**os.environ, "MY_API_KEY": "xyzzy", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*CLI, "debug-run", "--tidy", "--outfile", str(archive), "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 3
    assert done.stdout == "done\n"
    assert "a word\n" in done.stderr
    assert not list(tmp_path.glob("xlatrainer-debug-*"))
    assert names(archive) == FILES
    assert content(archive, "stdout.txt") == "done\n"
    assert "a word\n" in content(archive, "stderr.txt")
    assert content(archive, "graphs.0").count("aten::sin") == 3
    assert content(archive, "metrics.txt").count("[MetricsData; step=") == 3
    assert "Compilation Cause" in content(archive, "analysis.txt")
    assert "MY_API_KEY=(hidden)" in content(archive, "environment.txt")
    assert "torch: 2." in content(archive, "info.txt")


@pytest.mark.multiprocess
def test_the_files_stay_unless_it_is_tidy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script, archive = tmp_path / "script.py", tmp_path / "report.tar.gz"
    script.write_text("print('done')")
    assert main(["debug-run", "--outfile", str(archive), "--", sys.executable, str(script)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "done\n"
    (folder,) = tmp_path.glob("xlatrainer-debug-*")
    assert f"the files are in {folder}" in shown.err
    assert {path.name for path in folder.iterdir()} == names(archive) < FILES


@pytest.mark.multiprocess
def test_ctrl_c_ends_a_debug_run_and_the_archive_is_there(tmp_path: Path) -> None:
    archive = tmp_path / "report.tar.gz"
    program = "import time; print('begun', flush=True); time.sleep(600)"
    run = subprocess.Popen(
        [*CLI, "debug-run", "--tidy", "--outfile", str(archive), "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    with run:
        assert run.stdout.readline() == "begun\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=120) == 130
    assert "KeyboardInterrupt" in content(archive, "stderr.txt")


def test_debug_run_without_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug-run", "--outfile", str(tmp_path / "x.tar.gz"), "--"]) == 2
    assert "there is no program" in capsys.readouterr().err
    assert main(["debug-run", "--tidy", "--outfile", str(tmp_path / "x.tar.gz"), "--", "no-such-program"]) == 127
    assert "no-such-program" in capsys.readouterr().err


def test_secrets_stay_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_THING", "hush")
    monkeypatch.setenv("AN_ADDRESS", "https://me:hush@example.org/x")
    monkeypatch.setenv("HARMLESS", "loud")
    text = _environment()
    assert "hush" not in text
    assert "HARMLESS=loud\n" in text
    assert "AN_ADDRESS=https://(hidden)@example.org/x\n" in text


WAITING = """
import threading, time
{first}
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("enabled", [True, False])
def test_stacks_without_py_spy(enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    first = "from xlatrainer import debug; debug.enable_stack_dumps()" if enabled else ""
    with (tmp_path / "stderr").open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", WAITING.format(first=first)], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "begun\n"
        assert main(["dump-stacks", str(child.pid)]) == (0 if enabled else 1)
        deadline = time.monotonic() + 60
        while enabled and (tmp_path / "stderr").read_text().count("<module>") < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert (tmp_path / "stderr").read_text().lower().count("thread 0x") == (4 if enabled else 0)


def test_stacks_of_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump-stacks", "999999999"]) == 1
    assert "there is no process 999999999" in capsys.readouterr().err


def test_equal_stacks_are_shown_once() -> None:
    first, second = "    f (a.py:1)\n", "    g (b.py:2)\n"
    dump = f"Process 1: python\n\nThread 1 (idle)\n{first}\nThread 2 (idle)\n{second}Thread 3\n{first}"
    assert grouped(dump).splitlines() == [
        "Process 1: python",
        "",
        "STACK (count=2): Thread 1 (idle), Thread 3",
        "    f (a.py:1)",
        "STACK (count=1): Thread 2 (idle)",
        "    g (b.py:2)",
    ]


@pytest.mark.multiprocess
def test_bench_runs_in_the_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(__file__).resolve().parents[2]
    for folder, code in ((sources, 2), (tmp_path, 1)):
        done = subprocess.run(
            [*CLI, "bench", "nonsense"], capture_output=True, text=True, timeout=300, check=False, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(sources) if folder is sources else ""},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
