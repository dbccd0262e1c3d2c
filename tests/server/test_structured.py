"""Answers held to a form, from a model with random weights, through a real Triton and the official
client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.factory import make_tiny_model
from tests.server.service import Service
from tests.waiting import PATIENCE
from tridentlm.hub import ModelFiles
from tridentlm.text import Tokenizer

pytestmark = pytest.mark.server
MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TURNS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TEMPLATES = {
    "hermes": TURNS + "{{ tools | tojson }}{# <tool_call> #}",
    "mistral": TURNS + "{{ tools | tojson }}{# [TOOL_CALLS] #}",
    "llama3_json": TURNS + "{{ tools | tojson }}{# <|python_tag|> #}",
}
CLOSING = '"]}, '


class Weather(pydantic.BaseModel):
    city: Annotated[str, pydantic.Field(max_length=8)]
    kind: Literal["sun", "rain"]
    degrees: Annotated[int, pydantic.Field(ge=-40, le=50)] | None


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 6}, days={"enum": [1, 2, 3]}),
    tool("get_time", zone={"type": "string", "pattern": "^[A-Z]{3}$"}),
]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


class Case:
    """`fields` help a model with random weights to come to an end."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0)
        model = self.client.models.list().data[0].id
        tokenizer = Tokenizer.load(ModelFiles("hf", folder, model, folder))
        bias = {str(tokenizer.encode(mark)[0]): 4 for mark in CLOSING}
        self.fields: dict[str, Any] = {"model": model, "max_tokens": 600, "logit_bias": bias}

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**self.fields, messages=MESSAGES, **fields)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("structured")
    model = make_tiny_model("llama", folder / "tiny")
    flags = ["--model", str(model), "--device", "cpu", "--threads", "1", "--num-pages", "512"]
    flags += ["--trust-request-chat-template"]
    with Service(folder, *flags) as service:
        made = Case(service, model)
        with made.client:
            yield made


def test_the_parsing_helper_gives_a_model(case: Case) -> None:
    for seed in range(3):
        answer = case.client.chat.completions.parse(
            **case.fields, messages=MESSAGES, seed=seed, response_format=Weather
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"


def test_the_streaming_helper_gives_what_the_whole_answer_is(case: Case) -> None:
    fields: dict[str, Any] = {**case.fields, "messages": MESSAGES, "seed": 4}
    with case.client.chat.completions.stream(**fields, response_format=Weather) as events:
        kinds = {event.type for event in events}
        streamed = events.get_final_completion().choices[0].message
    whole = case.client.chat.completions.parse(**fields, response_format=Weather)
    assert "content.delta" in kinds
    assert streamed.parsed == whole.choices[0].message.parsed
    assert streamed.content == whole.choices[0].message.content


def test_choice_regex_and_grammar(case: Case) -> None:
    for value, pattern in (
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[A-Z]{2}[0-9]{1,3}"}, "[A-Z]{2}[0-9]{1,3}"),
        ({"grammar": 'root ::= "<" [a-c] [a-c]? ">"'}, "<[a-c]{1,2}>"),
        ({"json": {"type": "array", "items": {"const": 0}, "maxItems": 2}}, r"\[[0,\s]*\]"),
    ):
        answer = case.client.completions.create(
            **case.fields, prompt=["a", "b"], n=2, seed=1, extra_body={"structured_outputs": value}
        )
        texts = [choice.text for choice in answer.choices]
        assert len(texts) == 4
        assert all(re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize("format", sorted(TEMPLATES))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_demanded_call_comes_and_fits_its_schema(case: Case, format: str, choice: Any) -> None:
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    for seed in range(2):
        answer = case.chat(
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            extra_body={"chat_template": TEMPLATES[format]},
        )
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        assert choice == "required" or call.function.name == "get_time"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_demanded_call_streams(case: Case) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 7}
    extra = {"chat_template": TEMPLATES["hermes"]}
    fields["parallel_tool_calls"] = False
    [whole] = case.chat(**fields, extra_body=extra).choices[0].message.tool_calls
    chunks = list(case.chat(**fields, extra_body=extra, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [delta.function.name for delta in deltas if delta.id] == [whole.function.name]
    text = "".join(delta.function.arguments or "" for delta in deltas)
    assert text == whole.function.arguments


def test_a_cut_answer_says_so(case: Case) -> None:
    schema = {"type": "string", "minLength": 50}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    short = {**case.fields, "max_tokens": 4}
    answer = case.client.chat.completions.create(**short, messages=MESSAGES, response_format=form)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith('"')


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_that_names_it(case: Case, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        case.chat(response_format=form, stream=stream)
    assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_keyword")
    assert "'uniqueItems' at /properties/a" in caught.value.message


def test_a_stream_without_a_form_is_the_same_while_grammars_are_compiled(case: Case) -> None:
    """That it does not wait for them is shown by tests/grammar/test_engine.py."""
    plain: dict[str, Any] = {"prompt": "Once", "seed": 3, "stream": True}
    extra = {"ignore_eos": True}
    fields = {**case.fields, "max_tokens": 300, "logit_bias": {}}

    def stream() -> str:
        chunks = case.client.completions.create(**fields, **plain, extra_body=extra)
        return "".join(chunk.choices[0].text for chunk in chunks)

    def held(i: int) -> str:
        names = {f"field_{i}_{j}": {"type": "string", "pattern": "^[a-z]{2}$"} for j in range(200)}
        schema = {"type": "object", "properties": names, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        return str(case.chat(response_format=form, seed=i).choices[0].message.content)

    alone = stream()
    with ThreadPoolExecutor(5) as pool:
        running = pool.submit(stream)
        answers = list(pool.map(held, range(4)))
        assert running.result() == alone
    assert all(answer.startswith("{") for answer in answers)


def test_plain_triton_clients_have_it_too(case: Case) -> None:
    sampling = {"grammar": {"type": "choice", "value": ["yes", "no"]}, "max_tokens": 20}
    url = f"{case.service.triton_url}/v2/models/generate/generate"
    body = {"text_input": "Is it?", "sampling": json.dumps(sampling), "stream": False}
    assert httpx.post(url, json=body, timeout=PATIENCE).json()["text_output"] in ("yes", "no")
    body["sampling"] = json.dumps({"grammar": {"type": "regex", "value": "("}})
    refused = httpx.post(url, json=body, timeout=PATIENCE)
    assert refused.status_code == 400
    assert "invalid_grammar" in refused.text
