from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tridentlm.errors import InvalidRequest
from tridentlm.text import check_messages

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_known_roles_pass_unchanged(role: str) -> None:
    message = {"role": role, "content": "text", "name": "kept"}
    assert check_messages([message]) == [message]


def test_text_parts_are_joined_with_newlines_in_a_copy() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert check_messages([message]) == [{"role": "user", "content": "a\nb"}]
    assert message["content"] is parts


def test_content_may_miss_beside_tool_calls_only() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert check_messages([USER, calls])[1]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ([USER, "hi"], "messages[1]"),
        ([None], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([USER, {"role": "robot", "content": "hi"}], "messages[1].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "messages[0].content[1]",
        ),
    ],
)
def test_bad_structure_is_refused_where_it_is(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_messages(messages)
    assert error.value.param == param


def test_checking_needs_no_tokenizer_library() -> None:
    code = (
        "import sys; from tridentlm.text.messages import check_messages;"
        "assert not {'tokenizers', 'transformers', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
