"""docs/parity.md names tests that exist, and the versions that it compares with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "parity.md").read_text()


def test_every_row_names_a_test_that_exists() -> None:
    rows = [
        line for line in TEXT.splitlines() if line.startswith("| ") and "| TridentLM |" not in line
    ]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert len(named) == 1, row
        path, name = named[0]
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), row


def test_the_compared_versions_are_stated() -> None:
    for version in ("vLLM 0.33.0", "SGLang 0.5.23", "e1db8a6"):
        assert version in TEXT
