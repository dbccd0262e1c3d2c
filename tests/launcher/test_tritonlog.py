from __future__ import annotations

import pytest

from openai_proxy.tritonlog import load_failures, readable

FAILED = (
    "E1129 22:06:24.379474 8903 model_lifecycle.cc:642] \"failed to load 'engine' version 1: "
    'Internal: ValueError: no such model\\n\\nAt:\\n  /somewhere/model.py(24): <module>\\n"'
)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "I1129 22:00:50.6 6331 model_lifecycle.cc:839] \"successfully loaded 'relay'\"",
            "loaded relay",
        ),
        ('I1129 22:00:50.6 6331 metrics.cc:770] "Collecting CPU metrics"', ""),
        ("| server_version | 2.51.0 |", ""),
        ("+----+----+", ""),
        ("", ""),
        ('E1129 22:00:50.6 6331 server.cc:241] "CudaDriverHelper has not been initialized."', ""),
        ('W1129 22:00:50.6 6331 x.cc:9] "low on memory"', "low on memory (x.cc:9)"),
        ("a line that a model printed", "a line that a model printed"),
        ("  /somewhere/model.py(24): <module>", ""),
    ],
)
def test_a_line_is_shown_in_short_or_not_at_all(line: str, shown: str) -> None:
    assert readable(line) == shown


def test_a_model_that_failed_to_load_is_named_with_its_error() -> None:
    assert load_failures(["x", FAILED, "y"]) == ["engine: ValueError: no such model"]
