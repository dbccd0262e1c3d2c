"""`n`: several choices of one prompt, their seeds, order, usage and end."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import httpx
import openai
import pytest

from tests.proxy.fakes import FOREVER, MODEL, FakeSession, Proxy, Reply, ended, eventually
from tests.proxy.test_disconnect import open_request
from tridentlm_client import Delta, Submission

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def numbered(session: FakeSession) -> None:
    """Each submission's answer tells its place; the first is the slowest."""
    places = itertools.count()

    def reply(submission: Submission) -> Reply:
        place = next(places)
        pause = 0.03 if place == 0 else 0.0
        return Reply(steps=[pause, Delta(f"{place}", 1), Delta("!", 1), ended()])

    session.reply = reply


def test_n_choices_come_in_order_and_the_prompt_counts_once(
    client: openai.OpenAI, session: FakeSession
) -> None:
    numbered(session)
    answer = client.chat.completions.create(model=MODEL, messages=USER, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [
        (i, f"{i}!") for i in range(3)
    ]
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_the_streaming_helper_takes_n_choices(client: openai.OpenAI, session: FakeSession) -> None:
    numbered(session)
    options = {"include_usage": True}
    with client.chat.completions.stream(
        model=MODEL, messages=USER, n=4, stream_options=options
    ) as events:
        final = events.until_done().get_final_completion()
    assert [c.message.content for c in final.choices] == [f"{i}!" for i in range(4)]
    assert final.usage.prompt_tokens == 5
    assert final.usage.completion_tokens == 8


def test_every_index_is_opened_in_order_before_its_text(
    client: openai.OpenAI, session: FakeSession
) -> None:
    numbered(session)
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True))
    first = [chunk.choices[0] for chunk in chunks[:3]]
    assert [(c.index, c.delta.role) for c in first] == [(i, "assistant") for i in range(3)]
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[3:])


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_times_n_are_indexed_prompt_by_prompt(
    client: openai.OpenAI, session: FakeSession, stream: bool
) -> None:
    session.reply = lambda s: Reply(steps=[Delta(str(s.prompt), 1), ended()])
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, stream=stream)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == ["a", "a", "b", "b"]


def test_choice_i_has_the_requests_seed_plus_i(http: httpx.Client, session: FakeSession) -> None:
    http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3, "seed": 7})
    assert [s.sampling["seed"] for s in session.submissions] == [7, 8, 9] * 2
    session.submissions.clear()
    http.post(CHAT, json={"messages": USER, "n": 2, "seed": 2**64 - 1})
    assert [s.sampling["seed"] for s in session.submissions] == [2**64 - 1, 0]
    session.submissions.clear()
    http.post(CHAT, json={"messages": USER, "n": 2})
    assert all("seed" not in s.sampling for s in session.submissions)


def test_greedy_choices_are_allowed(http: httpx.Client) -> None:
    response = http.post(CHAT, json={"messages": USER, "n": 2, "temperature": 0})
    assert len(response.json()["choices"]) == 2


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True, [1]])
def test_another_n_is_refused(http: httpx.Client, session: FakeSession, n: Any) -> None:
    response = http.post(CHAT, json={"messages": USER, "n": n})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert session.submissions == []


def test_too_many_choices_in_all_are_refused(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["x"] * 100, "n": 11})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_one_disconnect_aborts_every_choice(
    proxy: Proxy, session: FakeSession, stream: bool
) -> None:
    pause = random.uniform(0.0, 0.01)
    session.reply = lambda s: Reply(steps=[pause, Delta("x", 1), FOREVER])
    connection = open_request(proxy, CHAT, messages=USER, n=5, stream=stream)
    eventually(lambda: session.attended)
    time.sleep(0.05)
    connection.close()
    eventually(lambda: len(session.aborted) == 5)
