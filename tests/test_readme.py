"""The README's examples run, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 3
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)  # each goes on from those before
    history = names["history"]
    assert history.history["val_accuracy"][-1] > 0.97  # type: ignore[attr-defined]
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "tensor([" in printed
    assert printed.endswith(" replayed\n")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page}: {target}"
