"""docs/environment.md says what the table of settings says."""

from scripts.environment_doc import FILE, text


def test_the_list_of_variables_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == text(), "run `python scripts/environment_doc.py`"
