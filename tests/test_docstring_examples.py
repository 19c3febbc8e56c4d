"""The examples in docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT) for path in (ROOT / "xlatrainer").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = path.with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted, "the examples are in no docstring"
    assert not result.failed, capsys.readouterr().out
