"""The README's examples run, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) == 4
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)  # each goes on from those before
    history = names["history"]
    assert history.history["val_accuracy"][-1] > 0.97  # type: ignore[attr-defined]
    assert (tmp_path / "checkpoint" / "model.safetensors").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "tensor([" in printed
    assert " replayed\n" in printed
    assert re.search(r"\n2\.weight +512x512 +fsdp, - +131,072 +393,216\n", printed)  # on the tests' 8 devices
    held = re.search(r"optimizer state: [\d,]+ bytes on each of 8 devices, ([\d.]+)% of [\d,]+\n$", printed)
    assert held is not None
    assert float(held[1]) < 14


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/sharding.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page}: {target}"
