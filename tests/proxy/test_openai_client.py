"""What the official client sees, for both endpoints, streaming and not, sync and async."""

from __future__ import annotations

import openai
import pytest

from tests.proxy.fakes import MODEL, FakeSession, Proxy, Reply, ended
from tridentlm.errors import ContextLengthExceeded, EngineDown, InternalError, Overloaded
from tridentlm_client import Delta, End, Submission

USER = [{"role": "user", "content": "Hi"}]


def test_chat_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=USER)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream_adds_up_to_the_whole_answer(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello world"
    assert [c.choices[0].delta.role for c in chunks] == ["assistant", None, None, None]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].created > 1_600_000_000


def test_the_streaming_helper_gets_the_final_completion(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    with client.chat.completions.stream(
        model=MODEL, messages=USER, stream_options=options
    ) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].message.role == "assistant"
    assert final.usage.total_tokens == 7


def test_finish_reason_length_reaches_the_client(
    client: openai.OpenAI, session: FakeSession
) -> None:
    session.reply = lambda s: Reply(steps=[Delta("Hel", 1), ended("length", 1)])
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=USER)


def test_stop_reason_names_the_stop_text(client: openai.OpenAI, session: FakeSession) -> None:
    session.reply = lambda s: Reply(steps=[Delta("a", 1), ended(stop="END")])
    answer = client.completions.create(model=MODEL, prompt="x", stop=["END"])
    assert answer.choices[0].model_extra["stop_reason"] == "END"
    assert session.submissions[-1].sampling["stop"] == ["END"]
    chunks = list(client.completions.create(model=MODEL, prompt="x", stop="END", stream=True))
    assert chunks[-1].choices[0].model_extra["stop_reason"] == "END"


def test_completion_of_one_text(client: openai.OpenAI, session: FakeSession) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Hello world"
    assert session.submissions == [Submission(prompt="Once", sampling={"max_tokens": 16})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_lists_give_their_choices_in_order(
    client: openai.OpenAI, session: FakeSession, prompt: object, submitted: list, stream: bool
) -> None:
    def reply(submission: Submission) -> Reply:
        text = str(submission.prompt or list(submission.input_ids))
        pause = 0.05 if text == str(submitted[0]) else 0.0
        return Reply(steps=[pause, Delta(text, 1), Delta("!", 1), ended()])

    session.reply = reply
    answer = client.completions.create(model=MODEL, prompt=prompt, stream=stream)
    texts = [""] * len(submitted)
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [f"{want}!" for want in submitted]
    if not stream:
        assert [choice.index for choice in answer.choices] == list(range(len(submitted)))
        assert answer.usage.prompt_tokens == 5 * len(submitted)
        assert answer.usage.completion_tokens == 2 * len(submitted)


def test_usage_of_a_stream_comes_last_and_alone(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1


def test_usage_on_each_chunk_grows(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt="x",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 2, 2]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {5}


def test_token_ids_come_when_asked(client: openai.OpenAI, session: FakeSession) -> None:
    steps = [
        Delta("", 1, {"token_ids": [7]}),
        Delta("é", 1, {"token_ids": [8]}),
        Delta("", 1, {"token_ids": [9]}),
        ended(),
    ]
    session.reply = lambda s: Reply(steps=steps)
    extra = {"return_token_ids": True}
    answer = client.completions.create(model=MODEL, prompt="x", extra_body=extra)
    assert answer.choices[0].model_extra["token_ids"] == [7, 8, 9]
    assert session.submissions[-1].return_token_ids
    chunks = client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=extra)
    shown = [(c.choices[0].text, (c.choices[0].model_extra or {}).get("token_ids")) for c in chunks]
    assert shown == [("é", [7, 8]), ("", [9])]


def test_async_client_runs_many_at_once(proxy: Proxy) -> None:
    import asyncio

    proxy.session.reply = lambda s: Reply(
        steps=[Delta(f"{s.messages[0]['content']}{i} ", 1) for i in range(20)] + [ended()]
    )

    async def one(client: openai.AsyncOpenAI, name: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": name}], stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, f"n{i}-") for i in range(32)))

    texts = asyncio.run(everyone())
    assert texts == ["".join(f"n{n}-{i} " for i in range(20)) for n in range(32)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (ContextLengthExceeded("too long", param="prompt"), openai.BadRequestError, 400),
        (Overloaded("full"), openai.InternalServerError, 503),
        (EngineDown("gone"), openai.InternalServerError, 503),
    ],
)
def test_refusals_are_typed_exceptions(
    client: openai.OpenAI,
    session: FakeSession,
    error: Exception,
    raised: type[openai.APIStatusError],
    status: int,
    stream: bool,
) -> None:
    session.reply = lambda s: Reply(refusal=error)
    with pytest.raises(raised) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == error.code
    assert error.message in str(caught.value)


def test_an_error_midway_raises_with_its_message(
    client: openai.OpenAI, session: FakeSession
) -> None:
    failure = End.from_error(InternalError("the engine fell over"))
    session.reply = lambda s: Reply(steps=[Delta("Hel", 1), 0.01, failure])
    chunks = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
    seen: list[str] = []
    with pytest.raises(openai.APIError, match="the engine fell over"):
        seen.extend(chunk.choices[0].delta.content for chunk in chunks)
    assert "".join(seen) == "Hel"


def test_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=USER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert model.owned_by == "tridentlm"
    assert model.model_extra["max_model_len"] == 128
    again = client.models.retrieve(MODEL)
    assert again == model
