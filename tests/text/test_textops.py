"""What the tokenizer model answers to a proxy, without Triton around it."""

from __future__ import annotations

from typing import Any

import pytest

from tridentlm.errors import InvalidRequest
from tridentlm.text.tokenizer import Tokenizer
from tridentlm.triton.textops import TextOps

USER = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}>>{{ x }}"
)
TEMPLATE += "{% endif %}"


@pytest.fixture
def ops(smollm: Tokenizer) -> TextOps:
    return TextOps(smollm)


def test_tokenizing_and_back(ops: TextOps, smollm: Tokenizer) -> None:
    answer = ops.run("tokenize", {"prompt": "Hello you", "return_token_strs": True})
    assert answer["tokens"] == smollm.encode("Hello you")
    assert "".join(answer["token_strs"]).replace("Ġ", " ") == "Hello you"
    assert ops.run("detokenize", {"tokens": answer["tokens"]}) == {"prompt": "Hello you"}


def test_messages_use_the_template_that_is_given(ops: TextOps, smollm: Tokenizer) -> None:
    body = {"messages": USER, "chat_template": TEMPLATE, "chat_template_kwargs": {"x": 1}}
    assert smollm.decode(ops.run("tokenize", body)["tokens"]) == "<Hi>>>1"
    assert ops.run("tokenize", {"messages": USER})["tokens"] == smollm.encode_chat(USER)


def test_describing_shows_what_comes_before_the_answer(ops: TextOps, smollm: Tokenizer) -> None:
    own = ops.run("describe", {})
    assert own["chat_template"] == smollm.chat_template
    assert own["generation_prompt"].endswith("<|im_start|>assistant\n")
    kwargs = {"x": 7, "tools": [1], "continue_final_message": True}
    given = ops.run("describe", {"chat_template": TEMPLATE, "chat_template_kwargs": kwargs})
    assert given == {"chat_template": TEMPLATE, "generation_prompt": ">>>7"}


def test_a_template_that_refuses_the_probe_is_described_without_a_prompt(ops: TextOps) -> None:
    template = "{{ raise_exception('system first') }}"
    described = ops.run("describe", {"chat_template": template})
    assert described == {"chat_template": template, "generation_prompt": ""}


@pytest.mark.parametrize(
    ("op", "body", "param"),
    [
        ("translate", {}, "op"),
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": USER, "chat_template": 3}, "chat_template"),
        ("tokenize", {"messages": USER, "chat_template_kwargs": 3}, "chat_template_kwargs"),
        ("tokenize", {"messages": USER, "chat_template_kwargs": {"tools": [{}]}}, "tools"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [2**40]}, "tokens"),
        ("detokenize", {"tokens": [2**31 - 1]}, "tokens"),
    ],
)
def test_what_cannot_be_done_is_named(
    ops: TextOps, op: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ops.run(op, body)
    assert caught.value.param == param
