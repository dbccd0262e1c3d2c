"""Choices, tools, thoughts and responses of the official client, through a real Triton.

A simulated engine says the same whatever it is asked, so a template that ends with the beginning of
an answer is not enough to make it call a tool: what is shown here is that every part of the request
arrives, and that nothing of the answer is lost on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.service import Service
from tests.waiting import PATIENCE, wait_until
from tridentlm.config import EngineSettings
from tridentlm.hub import default_model, resolve_model
from tridentlm.text import Tokenizer

pytestmark = pytest.mark.server
MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
SOON = 15.0
"""Seconds; the 7000 tokens of those who leave would take 35."""
TEMPLATE = (
    "{{ tools | tojson }}<tool_call>{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{{ m.tool_calls | default([]) | tojson }}]{% endfor %}"
)
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}


class Case:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0)
        self.model = self.client.models.list().data[0].id


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    flags = ["--runner", "simulated", "--model", str(default_model())]
    flags += ["--trust-request-chat-template"]
    with Service(tmp_path_factory.mktemp("features"), *flags) as service:
        made = Case(service)
        with made.client:
            yield made


def test_seeded_choices_are_those_of_their_seeds_alone(case: Case) -> None:
    fields: dict[str, Any] = {"model": case.model, "messages": MESSAGES, "max_tokens": 6}
    many = case.client.chat.completions.create(**fields, n=4, seed=11)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage.completion_tokens == 24
    alone = [case.client.chat.completions.create(**fields, seed=11 + i) for i in range(4)]
    assert [c.message.content for c in many.choices] == [
        a.choices[0].message.content for a in alone
    ]
    assert many.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_a_stream_of_choices_that_is_left_frees_them_all(case: Case) -> None:
    body = {"messages": MESSAGES, "n": 8, "stream": True, "max_tokens": 7000, "ignore_eos": True}
    url = f"{case.service.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        wait_until(lambda: case.service.status()["unfinished"] == 8, SOON, "all run")
    wait_until(case.service.idle, SOON, "every choice aborted")


def test_tools_and_calls_reach_the_template(case: Case) -> None:
    tokenizer = Tokenizer.load(resolve_model(EngineSettings()))
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    extra = {"chat_template": TEMPLATE}
    fields = {"messages": messages, "tools": [TOOL], **extra}
    answer = httpx.post(f"{case.service.url}/tokenize", json=fields, timeout=PATIENCE).json()
    text = tokenizer.decode(answer["tokens"])
    assert '"name": "get_weather", "parameters"' in text
    assert '"arguments": {"city": "Paris"}' in text
    assert "[tool:sunny" in text
    chat = case.client.chat.completions.create(
        model=case.model, messages=messages, tools=[TOOL], max_tokens=4, extra_body=extra
    )
    assert chat.usage.prompt_tokens == answer["count"]


def test_tools_are_refused_where_the_template_has_no_place_for_them(case: Case) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        case.client.chat.completions.create(model=case.model, messages=MESSAGES, tools=[TOOL])
    assert caught.value.param == "tools"


def test_an_engine_without_a_model_refuses_a_form(case: Case) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        case.client.chat.completions.create(
            model=case.model, messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")


def test_thoughts_that_the_template_opens_are_apart(case: Case) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}"
    extra = {"chat_template": template, "ignore_eos": True}
    answer = case.client.chat.completions.create(
        model=case.model, messages=MESSAGES, max_tokens=5, seed=3, extra_body=extra
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"] != ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


def test_responses_stream_what_they_answer_whole_and_go_on(case: Case) -> None:
    fields: dict[str, Any] = {"model": case.model, "input": "Hi", "max_output_tokens": 6}
    extra = {"seed": 5}
    whole = case.client.responses.create(**fields, extra_body=extra)
    events = list(case.client.responses.create(**fields, stream=True, extra_body=extra))
    assert events[-1].response.output_text == whole.output_text != ""
    assert events[-1].response.usage == whole.usage
    again = case.client.responses.create(
        model=case.model, input="More", previous_response_id=whole.id, max_output_tokens=2
    )
    assert again.usage.input_tokens > whole.usage.input_tokens
    assert case.client.responses.retrieve(again.id).output_text == again.output_text


def test_a_cancelled_background_response_frees_the_engine(case: Case) -> None:
    made = case.client.responses.create(
        model=case.model,
        input="Hi",
        background=True,
        max_output_tokens=7000,
        extra_body={"ignore_eos": True},
    )
    wait_until(lambda: case.service.status()["unfinished"] == 1, SOON, "it runs")
    assert case.client.responses.cancel(made.id).status == "cancelled"
    wait_until(case.service.idle, SOON, "aborted")


def test_generate_of_the_proxy_streams_whole_events(case: Case) -> None:
    body = {"text_input": "Once", "max_tokens": 4, "seed": 1}
    url = f"{case.service.url}/generate"
    events = httpx.post(url, json=body, timeout=PATIENCE).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    whole = httpx.post(url, json={**body, "stream": False}, timeout=PATIENCE).json()
    assert whole["usage"]["completion_tokens"] == 4
    assert whole["finish_reason"] in ("length", "stop")
