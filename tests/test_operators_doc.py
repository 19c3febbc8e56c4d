"""docs/operators.md says what the registry says."""

import pytest
import torch

from scripts.operators_doc import FILE, text
from tests.backend.opinfo_tables import RELEASE


@pytest.mark.skipif(
    not torch.__version__.startswith(f"{RELEASE}."), reason=f"the file lists torch {RELEASE}'s operators"
)
def test_the_list_of_operators_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run `python scripts/operators_doc.py`"
