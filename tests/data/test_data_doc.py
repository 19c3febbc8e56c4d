"""The examples of docs/data.md about loaders and caches run."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.multiprocess
@pytest.mark.parametrize("title", ["Device loaders", "Cached datasets"])
def test_the_examples_run(title: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    imports = "import torch\nimport xlatrainer as xla\n"
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(imports + example, "docs/data.md", "exec"), names)
    if title == "Device loaders":
        assert names["loss"].item() > 0  # type: ignore[attr-defined]
    else:
        assert [batch[0].shape for batch in names["loader"]] == [(10, 3, 32, 32)] * 10  # type: ignore[attr-defined]
