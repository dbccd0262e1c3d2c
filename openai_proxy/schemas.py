"""The bodies of the POST endpoints, for the OpenAPI document. These models only document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Sampling(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, description="The served model; may be left out.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1 are off.")
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Up to 16 texts that end the output.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = Field(1, ge=1, le=128, description="Choices for each prompt; choice i has seed + i.")
    timeout: float | None = Field(None, gt=0, description="Seconds from arrival; then a 504.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = Field(
        None, max_length=256, description="Cached prompts are shared with the same salt only."
    )
    user: str | None = Field(
        None, max_length=256, description="Users take turns; so does each safety_identifier."
    )
    priority: int = Field(0, description="Lower goes first, on a server with --policy priority.")
    min_tokens: int = Field(0, ge=0, description="Nothing ends the output before.")
    include_stop_str_in_output: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(
        None, max_length=1024, description="By token id, from -100 to 100."
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Not with stream.")


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    json_schema: dict[str, Any] | bool = Field(
        alias="schema", description="Enforced whether or not `strict` is set."
    )
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")


class StructuredOutputs(BaseModel):
    """Exactly one of them."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, description="The whole output matches; no look-around.")
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Lark, or llama.cpp's GBNF.")
    json_object: bool | None = None


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON of an object.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = Field(
        None, description="Needed, but for an assistant's message with tool_calls."
    )
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Arguments always fit `parameters`.")


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class ChatCompletionRequest(_Sampling):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The default is the rest of the context."
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs logprobs.")
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = Field(
        None, description="Refused unless the server trusts the templates of requests."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[Tool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="Or {type: function, function: {name}}, or {type: allowed_tools, ...}."
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call is passed on.")


class CompletionRequest(_Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0, description="0 with echo or prompt_logprobs only.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="The text begins with the prompt's.")


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = Field(None, description="This, or messages.")
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = Field(True, description="With prompt only.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
    skip_special_tokens: bool = False


class ResponseTool(BaseModel):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | list[dict[str, Any]] = Field(
        description="A text, or items: message, function_call, function_call_output, reasoning."
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Default: true where one process answers.")
    background: bool = Field(False, description="Answer at once; ask for the result later.")
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    tools: list[ResponseTool] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = Field(
        None, description="Or {type: function, name}."
    )
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs include.")
    metadata: dict[str, Any] | None = None


class GenerateRequest(_Sampling):
    text_input: str | None = Field(None, description="The prompt; `prompt` is the same.")
    prompt: str | None = None
    n: int = Field(1, ge=1, le=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="The text begins with the prompt's.")
    parameters: dict[str, Any] | None = Field(None, description="Fields that are not beside it.")
    stream: bool = True
