"""Log-probabilities and the sampler's options through a real Triton, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from tests.server.modelcase import ModelCase, serving
from tests.server.test_plain_clients import stream, tensor, text
from tridentlm.protocol import TokenLogprob
from tridentlm_client import Client

pytestmark = pytest.mark.server
TOLERANCE = 1e-3
PROMPT = "The capital of France is"
ON_TINY = pytest.mark.parametrize("case", ["llama"], indirect=True)  # the model does not matter
MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers."}]


class Case(ModelCase):
    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """Row i: transformers' of what follows token i."""
        logits = self.reference.model(torch.tensor([ids])).logits[0]
        return np.asarray(logits.log_softmax(-1).numpy())

    def complete(self, **fields: Any) -> Any:
        extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
        return self.client.completions.create(
            model=self.name, extra_body=extra, **{"prompt": PROMPT, **fields}
        )

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            model=self.name, messages=MESSAGES, extra_body={"return_token_ids": True}, **fields
        )


@pytest.fixture(scope="module", params=["smollm2", "llama"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    with serving(request.param, folder, 64) as (service, files):
        made = Case(service, files)
        with made.client:
            yield made


def near(told: list[float | None], rows: npt.NDArray[np.float32], ids: list[int]) -> None:
    expected = rows[np.arange(len(ids)), ids]
    np.testing.assert_allclose(np.array(told, np.float64), expected, atol=TOLERANCE)


def test_a_completions_are_those_of_transformers_streamed_and_not(case: Case) -> None:
    fields: dict[str, Any] = {"max_tokens": 10, "temperature": 0.9, "seed": 5, "logprobs": 4}
    choice = case.complete(**fields).choices[0]
    ids, told = choice.model_extra["token_ids"], choice.logprobs
    prompt = case.tokenizer.encode(PROMPT)
    rows = case.logprobs(prompt + ids)[len(prompt) - 1 : -1]
    near(told.token_logprobs, rows, ids)
    for row, top in zip(rows, told.top_logprobs, strict=True):
        assert max(top.values()) < float(row.max()) + TOLERANCE
        assert 1 <= len(top) <= 5  # tokens with one text, such as parts of characters, are one
    got: dict[str, list[Any]] = {name: [] for name in told.model_dump()}
    output = ""
    for chunk in case.complete(**fields, stream=True):
        output += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            for name, values in chunk.choices[0].logprobs.model_dump().items():
                got[name] += values
    assert (output, got) == (choice.text, told.model_dump())


def test_a_chats_are_those_of_transformers_streamed_and_not(case: Case) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logprobs": True}
    choice = case.chat(**fields, top_logprobs=2).choices[0]
    ids, told = choice.model_extra["token_ids"], choice.logprobs.content
    prompt = case.tokenizer.encode_chat(MESSAGES)
    rows = case.logprobs(prompt + ids)[len(prompt) - 1 : -1]
    near([token.logprob for token in told], rows, ids)
    likeliest = [[other.logprob for other in token.top_logprobs] for token in told]
    np.testing.assert_allclose(likeliest, -np.sort(-rows)[:, :2], atol=TOLERANCE)
    said = b"".join(bytes(token.bytes) for token in told if token.token != "<|im_end|>")
    assert said.decode("utf-8", "replace") == choice.message.content
    chunks = [c.choices[0] for c in case.chat(**fields, top_logprobs=2, stream=True) if c.choices]
    assert [t for c in chunks if c.logprobs for t in c.logprobs.content] == told
    with case.client.chat.completions.stream(
        model=case.name, messages=MESSAGES, **fields, extra_body={"stop_token_ids": ids[-1:]}
    ) as events:  # it raises for an answer that ends by its length
        final = events.get_final_completion().choices[0]
    assert [token.token for token in final.logprobs.content] == [
        token.token for token in told[: ids.index(ids[-1]) + 1]
    ]


@ON_TINY
def test_a_response_has_a_chats(case: Case) -> None:
    asked: dict[str, Any] = {"temperature": 0, "top_logprobs": 2}
    expected = case.chat(max_tokens=8, logprobs=True, **asked).choices[0].logprobs.content
    fields: dict[str, Any] = {
        **{"model": case.name, "input": MESSAGES, "max_output_tokens": 8},
        **{"include": ["message.output_text.logprobs"], **asked},
    }
    part = case.client.responses.create(**fields).output[0].content[0]
    assert [t.model_dump() for t in part.logprobs] == [t.model_dump() for t in expected]
    events = case.client.responses.create(**fields, stream=True)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == part.text
    told = [token.model_dump() for event in deltas for token in event.logprobs]
    assert told == [token.model_dump() for token in part.logprobs]


def test_a_prompt_is_scored_in_chunks_and_after_it_was_cached(case: Case) -> None:
    prompt = case.tokenizer.encode("Once upon a time there was a small house. " * 20)[:150]
    rows = case.logprobs(prompt)[:-1]
    case.complete(prompt=prompt, max_tokens=1)
    echoed = case.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert echoed.text == case.tokenizer.decode(prompt)
    assert (echoed.finish_reason, echoed.model_extra["token_ids"]) == ("length", [])
    assert echoed.logprobs.token_logprobs[0] is None
    near(echoed.logprobs.token_logprobs[1:], rows, prompt[1:])
    starts = [echoed.text[offset] for offset in echoed.logprobs.text_offset]
    assert starts == [token[0] for token in echoed.logprobs.tokens]
    extra = {"prompt_logprobs": 0}
    told = case.complete(prompt=prompt, max_tokens=1, extra_body=extra).choices[0]
    first, *others = told.model_extra["prompt_logprobs"]
    assert first is None
    near(
        [row[str(id)]["logprob"] for row, id in zip(others, prompt[1:], strict=True)],
        rows,
        prompt[1:],
    )


@ON_TINY
def test_an_echo_streams_the_prompt_first(case: Case) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    plain = case.complete(**fields).choices[0].text
    chunks = list(case.complete(**fields, echo=True, logprobs=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain
    assert chunks[0].choices[0].text.startswith(PROMPT)
    assert chunks[0].choices[0].logprobs.token_logprobs[0] is None


@ON_TINY
def test_stop_texts_keep_text_and_entries_in_step(case: Case) -> None:
    free = case.complete(max_tokens=8, temperature=0, logprobs=0).choices[0]
    stop = free.text[3:6]
    assert stop in free.text
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "stop": stop}
    cut = case.complete(**fields).choices[0]
    kept = case.complete(**fields, extra_body={"include_stop_str_in_output": True}).choices[0]
    at = free.text.index(stop)
    assert (cut.text, kept.text) == (free.text[:at], free.text[: at + len(stop)])
    for choice in (cut, kept):
        count = len(choice.model_extra["token_ids"])
        assert choice.logprobs.model_dump() == {
            name: values[:count] for name, values in free.logprobs.model_dump().items()
        }
    seen = 0
    for chunk in case.complete(**fields, stream=True):
        part = chunk.choices[0]
        if part.finish_reason is None and part.logprobs:
            assert all(offset < seen + len(part.text) for offset in part.logprobs.text_offset)
        seen += len(part.text)


@ON_TINY
def test_a_bias_and_penalties_change_what_is_said(case: Case) -> None:
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 0}
    plain = case.complete(**fields).choices[0].model_extra["token_ids"]
    forced = case.complete(**fields, logit_bias={str(plain[0] + 1): 100}).choices[0]
    assert set(forced.model_extra["token_ids"]) == {plain[0] + 1}
    forbidden = case.complete(**fields, logit_bias={str(plain[0]): -100}).choices[0]
    assert plain[0] not in forbidden.model_extra["token_ids"]
    unrepeated = case.complete(
        **fields, presence_penalty=2, frequency_penalty=2, extra_body={"repetition_penalty": 2}
    ).choices[0]
    ids = unrepeated.model_extra["token_ids"]
    assert len(set(ids)) > len(set(plain)) or len(set(ids)) == len(ids)


@ON_TINY
def test_min_tokens_holds_the_end_off(case: Case) -> None:
    first = case.complete(max_tokens=1, temperature=0).choices[0].model_extra["token_ids"][0]
    extra = {"stop_token_ids": [first]}
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    assert case.complete(**fields, extra_body=extra).choices[0].model_extra["token_ids"] == [first]
    held = case.complete(**fields, extra_body={**extra, "min_tokens": 5}).choices[0]
    assert first not in held.model_extra["token_ids"][:5]
    assert len(held.model_extra["token_ids"]) > 5


@ON_TINY
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"extra_body": {"min_tokens": 17}}, "min_tokens"),
        ({"max_tokens": None, "extra_body": {"min_tokens": 10**6}}, "min_tokens"),
    ],
)
def test_what_only_the_engine_can_refuse_is_refused_by_name(
    case: Case, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        case.complete(**fields)
    assert caught.value.param == param


@ON_TINY
def test_sessions_and_plain_clients_are_told_the_same(case: Case) -> None:
    sampling = {"max_tokens": 5, "temperature": 0, "logprobs": 2, "prompt_logprobs": 1}
    with Client(case.service.grpc) as client:
        result = client.generate(PROMPT, **sampling)
    prompt = case.tokenizer.encode(PROMPT)
    assert [token.chosen.token_id for token in result.prompt_logprobs] == prompt
    assert [token.chosen.token_id for token in result.logprobs] == result.token_ids
    rows = case.logprobs(prompt + result.token_ids)[:-1]
    values = [token.chosen.logprob for token in result.prompt_logprobs[1:] + result.logprobs]
    near(values, rows, (prompt + result.token_ids)[1:])
    inputs = [
        tensor("text_input", [PROMPT], "BYTES"),
        tensor("sampling", [json.dumps(sampling)], "BYTES"),
    ]
    responses = stream(case.service, "generate", inputs)
    assert "".join(map(text, responses)) == result.text
    told: dict[str, list[TokenLogprob]] = {"logprobs": [], "prompt_logprobs": []}
    for response in responses:
        if (part := response.as_numpy("logprobs")) is not None:
            for name, entries in json.loads(part[0]).items():
                told[name] += map(TokenLogprob.unpack, entries)
    for name, expected in (
        ("logprobs", result.logprobs),
        ("prompt_logprobs", result.prompt_logprobs),
    ):
        assert [t.chosen.token_id for t in told[name]] == [t.chosen.token_id for t in expected]
