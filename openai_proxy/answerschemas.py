"""The answers of the POST endpoints, for the OpenAPI document. These models only document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from openai_proxy.schemas import ToolCall


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class _Choice(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="The stop text or token id that was met.")


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(None, description="The same as reasoning.")
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    message: AnswerMessage


class CompletionChoice(_Choice):
    text: str
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorFields


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class GenerateResponse(BaseModel):
    model_name: str
    text_output: str
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    finish_reason: Literal["stop", "length"]
    usage: Usage
