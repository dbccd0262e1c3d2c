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


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def test_content_may_miss_beside_tool_calls_only() -> None:
    assert check_messages([USER, call("{}")])[1]["content"] == ""


@pytest.mark.parametrize("arguments", ['{"a": [1, "x"]}', {"a": [1, "x"]}])
def test_arguments_of_tool_calls_become_objects(arguments: Any) -> None:
    message = call(arguments)
    [checked] = check_messages([message])
    function = {"name": "f", "arguments": {"a": [1, "x"]}}
    assert checked["tool_calls"] == [{"id": "1", "type": "function", "function": function}]
    assert message == call(arguments)


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert check_messages([call("")])[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_the_old_role_function_is_a_tool() -> None:
    message = {"role": "function", "name": "f", "content": "3"}
    assert check_messages([message]) == [{"role": "tool", "name": "f", "content": "3"}]


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
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([call("{")], "messages[0].tool_calls[0].function.arguments"),
        ([call("[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([call(3)], "messages[0].tool_calls[0].function.arguments"),
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
