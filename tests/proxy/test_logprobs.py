"""Log-probabilities, echo and the sampler's options over HTTP: shapes, streams and refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from openai_proxy.chunks import MANY
from tests.proxy.fakes import MODEL, FakeSession, Reply, ended
from tridentlm_client import Delta, Submission

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "Hi"}]


def entry(offset: int | None, *candidates: list[Any]) -> list[Any]:
    return [offset, candidates[0], list(candidates[1:])]


HELLO = entry(
    0, [7, -0.5, 2, "Hello", None], [8, -0.25, 1, "Bye", None], [7, -0.5, 2, "Hello", None]
)
PART = entry(
    5, [9, -1.5, 1, "�", [226, 130]], [9, -1.5, 1, "�", [226, 130]], [3, -9999.0, 2, "", None]
)
REST = entry(5, [4, -0.125, 1, "�", [172]], [4, -0.125, 1, "�", [172]], [5, -3.0, 2, "�", [173]])
END = entry(6, [2, -2.0, 1, "<end>", None], [2, -2.0, 1, "<end>", None], [6, -4.0, 2, "!", None])
FIRST = entry(None, [1, None, None, "<s>", None])
SECOND = entry(None, [5, -7.0, 30, " x", None], [6, -0.5, 1, " y", None])


def told(text: str, *entries: list[Any], prompt: list[Any] | None = None) -> Delta:
    extra: dict[str, Any] = {"logprobs": list(entries), "token_ids": [e[1][0] for e in entries]}
    if prompt is not None:
        extra["prompt_logprobs"] = prompt
    return Delta(text, len(entries), extra)


STEPS = [told("Hello", HELLO), told("", PART), told("€", REST), told("", END), ended()]


@pytest.fixture(autouse=True)
def _script(session: FakeSession) -> None:
    session.reply = lambda submission: Reply(steps=STEPS)


CHAT_CONTENT = [
    {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "Bye", "logprob": -0.25, "bytes": list(b"Bye")},
            {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")},
        ],
    },
    {
        "token": "�",
        "logprob": -1.5,
        "bytes": [226, 130],
        "top_logprobs": [
            {"token": "�", "logprob": -1.5, "bytes": [226, 130]},
            {"token": "", "logprob": -9999.0, "bytes": []},
        ],
    },
]


def test_a_chats_tokens_are_told_with_their_bytes(
    client: openai.OpenAI, session: FakeSession
) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2
    )
    assert session.submissions[-1].sampling == {"logprobs": 2}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.refusal is None
    assert [token.model_dump() for token in logprobs.content or ()][:2] == CHAT_CONTENT
    assert [token.token for token in logprobs.content or ()] == ["Hello", "�", "�", "<end>"]


def test_logprobs_without_a_number_are_of_the_sampled_token_alone(
    client: openai.OpenAI, session: FakeSession
) -> None:
    client.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    assert session.submissions[-1].sampling == {"logprobs": 0}
    client.completions.create(model=MODEL, prompt="x", logprobs=0)
    assert session.submissions[-1].sampling == {"logprobs": 0, "max_tokens": 16}


def test_a_completions_tokens_are_four_lists(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", "�", "�", "<end>"]
    assert logprobs.token_logprobs == [-0.5, -1.5, -0.125, -2.0]
    assert logprobs.text_offset == [0, 5, 5, 6]
    assert [list(top.items()) for top in logprobs.top_logprobs or ()] == [
        [("Hello", -0.5), ("Bye", -0.25)],
        [("�", -1.5), ("", -9999.0)],
        [("�", -0.125)],
        [("<end>", -2.0), ("!", -4.0)],
    ]


@pytest.mark.parametrize("usage", [False, True])
def test_a_streams_chunks_add_up_to_the_whole_and_none_precedes_its_text(
    client: openai.OpenAI, usage: bool
) -> None:
    options: Any = {"continuous_usage_stats": usage}
    chat: dict[str, Any] = {"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**chat).choices[0].logprobs
    chunks = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**chat, stream=True, stream_options=options)
    ]
    counts = [len(c.logprobs.content or ()) if c.logprobs else 0 for c in chunks]
    assert [c.delta.content or "" for c in chunks] == ["", "Hello", "€", ""]
    assert counts == [0, 1, 2, 1]
    assert whole is not None
    assert [t for c in chunks if c.logprobs for t in c.logprobs.content or ()] == whole.content
    plain: dict[str, Any] = {"model": MODEL, "prompt": "x", "logprobs": 2}
    lists = client.completions.create(**plain).choices[0].logprobs
    assert lists is not None
    got: dict[str, list[Any]] = {name: [] for name in lists.model_dump()}
    for part in client.completions.create(**plain, stream=True, stream_options=options):
        if part.choices[0].logprobs:
            for name, values in part.choices[0].logprobs.model_dump().items():
                got[name] += values
    assert got == lists.model_dump()


def test_who_does_not_ask_gets_null(client: openai.OpenAI, session: FakeSession) -> None:
    session.reply = lambda submission: Reply()
    assert client.chat.completions.create(model=MODEL, messages=USER).choices[0].logprobs is None
    for chunk in client.completions.create(model=MODEL, prompt="x", stream=True):
        assert chunk.choices[0].logprobs is None


def test_a_prompts_are_as_vllm_has_them(http: httpx.Client, session: FakeSession) -> None:
    steps = [told("Hello", HELLO, prompt=[FIRST, SECOND]), ended()]
    session.reply = lambda submission: Reply(steps=steps)
    expected = [
        None,
        {
            "5": {"logprob": -7.0, "rank": 30, "decoded_token": " x"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": " y"},
        },
    ]
    chat = http.post(CHAT, json={"messages": USER, "prompt_logprobs": 1}).json()
    assert chat["prompt_logprobs"] == expected
    answer = http.post(COMPLETIONS, json={"prompt": ["a", "b"], "prompt_logprobs": 1}).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
    assert session.submissions[-1].sampling == {"prompt_logprobs": 1, "max_tokens": 16}


def test_echo_is_the_engines(client: openai.OpenAI, session: FakeSession) -> None:
    first = entry(0, [1, None, None, "x", None])
    session.reply = lambda submission: Reply(steps=[told("xHello", first, HELLO), ended()])
    answer = client.completions.create(
        model=MODEL, prompt="x", echo=True, logprobs=2, max_tokens=0
    ).choices[0]
    sampling = {"echo": True, "logprobs": 2, "max_tokens": 0}
    assert session.submissions == [Submission(prompt="x", sampling=sampling)]
    assert answer.text == "xHello"
    assert answer.logprobs is not None
    assert answer.logprobs.token_logprobs == [None, -0.5]
    assert (answer.logprobs.top_logprobs or [{}])[0] is None


def test_generate_tells_what_a_completion_tells_streamed_and_not(
    client: openai.OpenAI, http: httpx.Client, session: FakeSession
) -> None:
    choice = client.completions.create(model=MODEL, prompt="x", logprobs=2).choices[0]
    assert choice.logprobs is not None
    expected = choice.logprobs.model_dump()
    asked = {"text_input": "x", "logprobs": 2}
    whole = http.post("/generate", json={**asked, "stream": False}).json()
    assert session.submissions[-1].sampling == {"logprobs": 2}
    assert (whole["text_output"], whole["logprobs"]) == (choice.text, expected)
    lines = http.post("/generate", json=asked).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [len(event["logprobs"]["tokens"]) for event in events] == [1, 2, 1]
    for name, values in expected.items():
        assert [value for event in events for value in event["logprobs"][name]] == values


def test_generate_tells_of_the_prompt(http: httpx.Client, session: FakeSession) -> None:
    steps = [told("Hello", HELLO, prompt=[FIRST, SECOND]), ended()]
    session.reply = lambda submission: Reply(steps=steps)
    body = {"text_input": "x", "stream": False, "echo": True, "prompt_logprobs": 1}
    answer = http.post("/generate", json=body).json()
    assert session.submissions[-1].sampling == {"echo": True, "prompt_logprobs": 1}
    assert [top and list(top) for top in answer["prompt_logprobs"]] == [None, ["5", "6"]]


def test_what_comes_in_parts_is_one_list(http: httpx.Client, session: FakeSession) -> None:
    parts = [told("Hello", HELLO, prompt=[FIRST]), told("", prompt=[SECOND]), told("", END)]
    session.reply = lambda submission: Reply(
        steps=[parts[0], 0.02, parts[1], 0.02, *parts, ended()]
    )
    chat = http.post(CHAT, json={"messages": USER, "prompt_logprobs": 1, "logprobs": True}).json()
    assert [top and len(top) for top in chat["prompt_logprobs"]] == [None, 2, None, 2]
    content = chat["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["Hello", "Hello", "<end>"]
    assert chat["choices"][0]["message"]["content"] == "HelloHello"
    body = {"text_input": "x", "stream": False, "prompt_logprobs": 1, "logprobs": 1}
    answer = http.post("/generate", json=body).json()
    assert answer["prompt_logprobs"] == chat["prompt_logprobs"]
    assert answer["logprobs"]["text_offset"] == [0, 0, 6]


@pytest.mark.parametrize("path", [COMPLETIONS, "/generate"])
def test_many_of_an_echo_do_not_wait_for_text(
    http: httpx.Client, session: FakeSession, path: str
) -> None:
    many = told("", *[HELLO] * MANY)
    steps = [told("x", HELLO), many, told("", PART), many, told("y", REST), ended()]
    session.reply = lambda submission: Reply(steps=steps)
    body = {"prompt": "x", "logprobs": 2, "echo": True, "stream": True}
    events = [
        json.loads(line[6:])
        for line in http.post(path, json=body).text.splitlines()
        if line.startswith("data: {")
    ]
    found = [event["choices"][0] if "choices" in event else event for event in events]
    counts = [len(choice["logprobs"]["tokens"]) for choice in found if choice.get("logprobs")]
    assert counts == [1, MANY, MANY + 1, 1]


OPTIONS = {
    "min_tokens": 3,
    "include_stop_str_in_output": True,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"50": -100, "7": 2.5},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
def test_the_samplers_options_reach_the_engine(
    http: httpx.Client, session: FakeSession, path: str
) -> None:
    text = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}}
    body = {**text.get(path, {"text_input": "x"}), **OPTIONS, "max_tokens": 9, "stream": False}
    assert http.post(path, json=body).status_code == 200
    assert session.submissions[-1].sampling == {**OPTIONS, "max_tokens": 9}


BAD: list[tuple[str, str, Any, dict[str, Any]]] = [
    *[
        (path, name, value, {})
        for path in (CHAT, COMPLETIONS)
        for name, value in [
            ("presence_penalty", 2.1),
            ("presence_penalty", "1"),
            ("frequency_penalty", -2.5),
            ("frequency_penalty", True),
            ("repetition_penalty", 0),
            ("repetition_penalty", 101),
            ("min_tokens", -1),
            ("min_tokens", 1.5),
            ("min_tokens", 17),
            ("include_stop_str_in_output", 1),
            ("logit_bias", [1]),
            ("logit_bias", {"a": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"²": 1}),
            ("logit_bias", {"4294967296": 1}),
            ("logit_bias", {"1": 101}),
            ("logit_bias", {"1": None}),
            ("logit_bias", {str(i): 0 for i in range(1025)}),
            ("prompt_logprobs", 21),
            ("prompt_logprobs", -1),
            ("prompt_logprobs", "1"),
        ]
    ],
    (CHAT, "logprobs", 1, {}),
    (CHAT, "top_logprobs", 21, {"logprobs": True}),
    (CHAT, "top_logprobs", -1, {"logprobs": True}),
    (CHAT, "top_logprobs", True, {"logprobs": True}),
    (CHAT, "top_logprobs", 2, {}),
    (CHAT, "top_logprobs", 2, {"logprobs": False}),
    (CHAT, "echo", True, {}),
    (CHAT, "prompt_logprobs", 1, {"stream": True}),
    (COMPLETIONS, "logprobs", 21, {}),
    (COMPLETIONS, "logprobs", True, {}),
    (COMPLETIONS, "top_logprobs", 2, {"logprobs": 2}),
    (COMPLETIONS, "echo", "yes", {}),
    (COMPLETIONS, "max_tokens", 0, {}),
    (COMPLETIONS, "prompt_logprobs", 1, {"stream": True}),
    ("/generate", "logprobs", 21, {}),
    ("/generate", "logprobs", True, {}),
    ("/generate", "prompt_logprobs", 1, {}),
    ("/generate", "top_logprobs", 2, {"logprobs": 2}),
]


@pytest.mark.parametrize(("path", "name", "value", "more"), BAD)
def test_a_bad_value_is_refused_by_name(
    http: httpx.Client, session: FakeSession, path: str, name: str, value: Any, more: dict[str, Any]
) -> None:
    text = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}}.get(path, {"text_input": "x"})
    body = {**text, "max_tokens": 16, **more, name: value}
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"
    assert session.submissions == []
