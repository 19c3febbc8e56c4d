"""The examples of docs/data.md run."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.multiprocess
@pytest.mark.parametrize("title", ["Device loaders", "Cached datasets", "TFRecord files"])
def test_the_examples_run(title: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    imports = "import torch\nimport xlatrainer as xla\n"
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(imports + example, "docs/data.md", "exec"), names)
    if title == "Device loaders":
        assert names["loss"].item() > 0  # type: ignore[attr-defined]
    elif title == "TFRecord files":
        first: Any = names["first"]
        assert (first["pixels"].shape, first["label"].tolist(), first["name"]) == ((784,), [0], "a 0")
        labels = [label for batch in names["loader"] for label in batch["label"].tolist()]  # type: ignore[attr-defined]
        assert sorted(labels) == list(range(10))
    else:
        assert [batch[0].shape for batch in names["loader"]] == [(10, 3, 32, 32)] * 10  # type: ignore[attr-defined]
