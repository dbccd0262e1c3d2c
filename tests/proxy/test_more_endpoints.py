"""/generate, /v1/embeddings and the trace header."""

from __future__ import annotations

import json
import logging

import httpx
import openai
import pytest

from tests.proxy.fakes import MODEL, FakeSession, Reply, eventually
from tridentlm.errors import InternalError, Overloaded
from tridentlm_client import Delta, End

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 1},
}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_generate_streams_events_that_are_whole(http: httpx.Client, session: FakeSession) -> None:
    response = http.post("/generate", json={"text_input": "Once", "max_tokens": 3, "top_k": 2})
    assert response.headers["content-type"] == "text/event-stream"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert [json.loads(event[6:]) for event in events] == [
        {"text_output": "Hello"},
        {"text_output": " world"},
        {"text_output": "", "finish_reason": "stop", "usage": USAGE},
    ]
    assert session.submissions[-1].prompt == "Once"
    assert session.submissions[-1].sampling == {"max_tokens": 3, "top_k": 2}


def test_generate_answers_whole_when_asked(http: httpx.Client) -> None:
    body = {"prompt": "Once", "stream": False}
    assert http.post("/generate", json=body).json() == {
        "model_name": MODEL,
        "text_output": "Hello world",
        "finish_reason": "stop",
        "usage": USAGE,
    }


def test_generate_takes_fields_in_parameters_too(http: httpx.Client, session: FakeSession) -> None:
    nested = {"max_tokens": 3, "temperature": 0, "stream": False}
    body = {"text_input": "x", "temperature": 0.5, "parameters": nested}
    assert http.post("/generate", json=body).json()["text_output"] == "Hello world"
    assert session.submissions[-1].sampling == {"max_tokens": 3, "temperature": 0.5}
    for value, param in (([1], "parameters"), ({"best_of": 2}, "best_of")):
        refused = http.post("/generate", json={"text_input": "x", "parameters": value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["sampling_params", "max_new_tokens"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_other_servers_names_of_a_limit_are_refused(
    http: httpx.Client, path: str, name: str
) -> None:
    """Left out they would cost the rest of the context."""
    value = 8 if name == "max_new_tokens" else {"max_new_tokens": 8}
    refused = http.post(path, json={"prompt": "x", name: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_generate_has_errors_of_the_one_shape(http: httpx.Client, session: FakeSession) -> None:
    assert http.post("/generate", json={}).json()["error"]["param"] == "text_input"
    body = {"text_input": "x"}
    assert http.post("/generate", json=body | {"n": 1}).status_code == 200
    for name, value in (("n", 2), ("top_logprobs", 2), ("best_of", 2)):
        refused = http.post("/generate", json=body | {name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    session.reply = lambda s: Reply(refusal=Overloaded("full"))
    assert http.post("/generate", json=body).status_code == 503
    failure = End.from_error(InternalError("broke"))
    session.reply = lambda s: Reply(steps=[Delta("a", 1), 0.01, failure])
    events = http.post("/generate", json=body).text.split("\n\n")
    assert json.loads(events[-3][6:])["error"]["message"] == "broke"
    assert events[-2] == "data: [DONE]"


def test_embeddings_are_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings") as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unsupported_endpoint"


@pytest.mark.parametrize(("given", "logged"), [(TRACE, True), ("nonsense", False)])
def test_a_trace_header_is_in_the_access_log(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, given: str, logged: bool
) -> None:
    with caplog.at_level(logging.INFO, "openai_proxy.access"):
        http.get("/version", headers={"traceparent": given, "x-request-id": "mine"})
        eventually(lambda: "request_id=mine " in caplog.text)
    assert (given in caplog.text) == logged
