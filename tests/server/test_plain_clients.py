"""Plain Triton clients on `generate` and `engine`: the official tritonclient, and HTTP."""

from __future__ import annotations

import json
import queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.server.service import Service
from tests.waiting import PATIENCE

pytestmark = pytest.mark.server


def tensor(name: str, values: Any, datatype: str) -> triton.InferInput:
    kind = {"BYTES": object, "INT32": np.int32, "BOOL": bool, "FP32": np.float32, "INT64": np.int64}
    array = np.array(values, dtype=kind[datatype])
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def stream(service: Service, model: str, inputs: list[Any], **options: Any) -> list[Any]:
    """All responses of one request over tritonclient's gRPC stream; an error is raised."""
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(service.grpc) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        client.async_stream_infer(
            model, inputs, enable_empty_final_response=True, request_id="r1", **options
        )
        responses = []
        while True:
            result = results.get(timeout=PATIENCE)
            if isinstance(result, Exception):
                raise result
            parameters = result.get_response().parameters
            if result.as_numpy("finish_reason") is not None:
                responses.append(result)
            if parameters["triton_final_response"].bool_param:
                return responses


def post(service: Service, body: dict[str, Any]) -> httpx.Response:
    url = f"{service.triton_url}/v2/models/generate/generate"
    return httpx.post(url, json=body, timeout=PATIENCE)


def text(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def reason(result: Any) -> str:
    return str(result.as_numpy("finish_reason")[0].decode())


def test_grpc_streaming_gives_every_token_once_and_the_reason_with_the_last(
    simulated: Service,
) -> None:
    inputs = [tensor("text_input", ["Hello"], "BYTES"), tensor("max_tokens", [20], "INT32")]
    responses = stream(simulated, "generate", inputs)
    ids = [i for r in responses for i in r.as_numpy("token_ids").tolist()]
    usage = json.loads(responses[-1].as_numpy("usage")[0])
    assert len(ids) == 20
    assert [reason(r) for r in responses] == [""] * (len(responses) - 1) + ["length"]
    assert usage == {"prompt_tokens": 1, "completion_tokens": 20, "cached_tokens": 0}
    assert "".join(map(text, responses))


def test_stream_false_gives_exactly_one_response_with_the_same_text(simulated: Service) -> None:
    def run(streaming: bool) -> list[Any]:
        inputs = [
            tensor("text_input", ["Hello"], "BYTES"),
            tensor("max_tokens", [200], "INT32"),
            tensor("seed", [7], "INT64"),
            tensor("stream", [streaming], "BOOL"),
        ]
        return stream(simulated, "generate", inputs)

    streamed, whole = run(True), run(False)
    assert len(whole) == 1
    assert len(streamed) > 1
    assert text(whole[0]) == "".join(map(text, streamed))


def test_token_ids_go_straight_to_the_engine(simulated: Service) -> None:
    inputs = [
        tensor("input_ids", [11, 12, 13], "INT32"),
        tensor("sampling", ['{"max_tokens": 5}'], "BYTES"),
    ]
    responses = stream(simulated, "engine", inputs)
    assert sum(len(r.as_numpy("token_ids")) for r in responses) == 5
    assert json.loads(responses[-1].as_numpy("usage")[0])["prompt_tokens"] == 3


def test_messages_go_through_the_chat_template(simulated: Service) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    inputs = [tensor("messages", [messages], "BYTES"), tensor("max_tokens", [2], "INT32")]
    responses = stream(simulated, "generate", inputs)
    assert json.loads(responses[-1].as_numpy("usage")[0])["prompt_tokens"] > 5


def test_options_work_as_request_parameters_too(simulated: Service) -> None:
    responses = stream(
        simulated,
        "generate",
        [tensor("text_input", ["Hello"], "BYTES")],
        parameters={"max_tokens": 3, "temperature": 0.5},
    )
    assert sum(len(r.as_numpy("token_ids")) for r in responses) == 3


def test_http_generate_answers_with_one_json_object(simulated: Service) -> None:
    body = {"text_input": "Hello", "max_tokens": 6, "stream": False}
    answer = post(simulated, body)
    assert answer.status_code == 200
    assert answer.json()["finish_reason"] == "length"
    assert len(answer.json()["token_ids"]) == 6


def test_log_probabilities_and_echo_come_when_asked_in_any_of_three_ways(
    simulated: Service,
) -> None:
    fields = {"text_input": "Hello", "max_tokens": 4, "seed": 2, "stream": False}
    ways = (
        {"logprobs": 1, "echo": True},
        {"parameters": {"logprobs": 1, "echo": True}},
        {"sampling": '{"logprobs": 1, "echo": true}'},
    )
    answers = [post(simulated, {**fields, **way}).json() for way in ways]
    assert answers[0] == answers[1] == answers[2]
    told = json.loads(answers[0]["logprobs"])["logprobs"]
    assert answers[0]["text_output"].startswith("Hello")
    assert [token[1][0] for token in told[1:]] == answers[0]["token_ids"]
    assert told[0][1][1] is None
    assert all(len(top) == 1 for _, _, top in told[1:])
    assert "logprobs" not in post(simulated, fields).json()


def test_http_generate_stream_sends_events_that_add_up_to_the_answer(simulated: Service) -> None:
    url = f"{simulated.triton_url}/v2/models/generate/generate_stream"
    body = {"text_input": "Hello", "max_tokens": 9, "seed": 5}
    whole = post(simulated, {**body, "stream": False}).json()
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
        events = [json.loads(ln[6:]) for ln in answer.iter_lines() if ln.startswith("data: ")]
    assert "".join(e["text_output"] for e in events) == whole["text_output"]
    assert events[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_input": "Hello", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "Hello", "temperature": -1.0}, "temperature"),
        ({"text_input": "Hello", "max_token": 5}, "max_token"),
        ({"text_input": "Hello", "max_tokens": 100_000}, "max_tokens"),
        ({"text_input": "Hello", "sampling": "{"}, "sampling"),
        ({"text_input": "Hello", "sampling": '{"nonsense": 1}'}, "nonsense"),
        ({"text_input": "Hello", "messages": "[]"}, "prompt"),
        ({"messages": "["}, "messages"),
        ({"messages": '[{"role": "nobody", "content": "x"}]'}, "messages[0].role"),
        ({"max_tokens": 5}, "prompt"),
        ({"text_input": ""}, "prompt"),
    ],
)
def test_a_bad_plain_request_is_400_with_message_type_param_and_code(
    simulated: Service, body: dict[str, Any], param: str
) -> None:
    answer = post(simulated, body)
    error = answer.json()["error"]
    payload = json.loads(error[error.index("{") :])
    assert answer.status_code == 400
    assert payload["type"] == "invalid_request_error"
    assert payload["param"] == param
    assert set(payload) == {"message", "type", "param", "code"}


def test_a_timeout_ends_a_plain_request_and_says_so(simulated: Service) -> None:
    body = {"text_input": "Hello", "max_tokens": 2000, "stream": False, "timeout": 1.0}
    answer = post(simulated, body).json()
    assert answer["finish_reason"] == "abort"
    assert 0 < len(answer["token_ids"]) < 400
