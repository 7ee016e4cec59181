"""The inputs of requests: prompts, sampling parameters, and their protobuf messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import grpc

from quire_client import inference_pb2 as pb
from quire_client.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, which the model's chat template turns into a prompt."""

    messages: Sequence[Mapping[str, Any]]
    """Messages with ``role`` and ``content``, and optional fields such as ``tool_calls``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools in the format of OpenAI's API. Tool calls are returned as text."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the text that begins the assistant's turn."""
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None
    """Further variables for the chat template."""


Prompt = str | Sequence[int] | Chat
"""A text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters. ``None`` and empty lists mean the server's defaults."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    logprobs: int | None = None
    """How many of the likeliest tokens to return with each token; 0 scores only the token."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    """As ``logprobs``, for the prompt's tokens except the first."""
    logprob_start_len: int | None = None
    """How many tokens at the prompt's beginning ``prompt_logprobs`` skips."""
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt; -1 keeps what leaves room for ``max_tokens``."""
    logprob_token_ids: Sequence[int] = ()
    """Tokens whose log-probabilities are added to ``top``, after the most probable ones."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning."""
    thinking_token_ids: Sequence[int] = ()
    """Ids of the tokens that begin and end reasoning, if the gateway does not know them."""
    json_schema: str | Mapping[str, Any] | None = None
    """Constrains the output to JSON of this schema. At most one of the four constraints is set."""
    regex: str | None = None
    grammar: str | None = None
    """Constrains the output to a grammar in Lark's or llama.cpp's syntax."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Constrains parts of a text, in the format of vLLM and SGLang."""


_CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag")


def generate_request(
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    model: str,
    cache_salt: str,
    priority: int,
) -> pb.GenerateRequest:
    """Raises InvalidArgument: a value cannot be sent."""
    request = pb.GenerateRequest(model=model, cache_salt=cache_salt)
    _set(request, "priority", priority)
    _set_prompt(request, prompt)
    _set_params(request.sampling, params or SamplingParams())
    return request


def tokenize_request(
    prompt: str | Chat, *, model: str, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """Raises InvalidArgument: a value cannot be sent."""
    request = pb.TokenizeRequest(model=model, no_special_tokens=not add_special_tokens)
    _set_prompt(request, prompt)
    return request


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    *,
    model: str,
    dimensions: int,
    truncate_prompt_tokens: int | None,
    cache_salt: str,
) -> pb.EmbedRequest:
    """Raises InvalidArgument: a value cannot be sent."""
    request = pb.EmbedRequest(
        model=model,
        dimensions=dimensions,
        truncate_prompt_tokens=truncate_prompt_tokens,
        cache_salt=cache_salt,
    )
    for each in inputs:
        given = request.inputs.add()
        if isinstance(each, str):
            given.text = _text("inputs", each)
        else:
            given.token_ids.SetInParent()
            _extend(given.token_ids.ids, each, name="inputs")
    return request


def rank_request(
    query: str,
    documents: Sequence[str],
    *,
    model: str,
    top_n: int,
    truncate_prompt_tokens: int | None,
    cache_salt: str,
) -> pb.RankRequest:
    """Raises InvalidArgument: a value cannot be sent."""
    return pb.RankRequest(
        model=model,
        query=_text("query", query),
        documents=[_text("documents", each) for each in documents],
        top_n=top_n,
        truncate_prompt_tokens=truncate_prompt_tokens,
        cache_salt=cache_salt,
    )


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Raises InvalidArgument: a value cannot be sent."""
    request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    _extend(request.token_ids, token_ids, name="token_ids")
    return request


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, Chat):
        request.chat.CopyFrom(_chat(prompt))
    elif isinstance(prompt, str):
        request.text = _text("prompt", prompt)
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, prompt, name="prompt")
    else:
        raise _invalid("prompt", prompt, "must be a text or a Chat")


def _chat(chat: Chat) -> pb.Chat:
    return pb.Chat(
        messages=[_message(message) for message in chat.messages],
        no_generation_prompt=not chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs_json=_json("template_kwargs", chat.template_kwargs),
        tools_json=_json("tools", chat.tools and list(chat.tools)),
    )


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    more = dict(message)
    turn = pb.ChatMessage(role=_text("role", more.pop("role", "")))
    if isinstance(more.get("content"), str):
        turn.content = _text("content", more.pop("content"))
    turn.fields_json = _json("message", more)
    return turn


def _set_params(message: pb.SamplingParams, params: SamplingParams) -> None:
    given = {
        each.name: getattr(params, each.name)
        for each in fields(params)
        if getattr(params, each.name) not in (None, (), [])
    }
    constraints = {name: given.pop(name) for name in _CONSTRAINTS if name in given}
    if len(constraints) > 1:
        raise _invalid("params", list(constraints), "only one of these may be set")
    for name, value in constraints.items():
        text = value if isinstance(value, str) else _json(name, value)
        _set(message.structured_outputs, name, _text(name, text))
    for name, value in given.items():
        if name == "logit_bias":
            _fill(message.logit_bias, value)
        elif name == "bad_words_token_ids":
            for each in value:
                _extend(message.bad_words_token_ids.add().ids, each, name=name)
        elif name == "stop" and isinstance(value, str):
            message.stop.append(_text(name, value))
        elif isinstance(value, Sequence):
            _extend(getattr(message, name), value, name=name)
        else:
            _set(message, name, value)


def _fill(message: Any, biases: Mapping[int, float]) -> None:
    try:
        for token_id, bias in biases.items():
            message[token_id] = bias
    except (TypeError, ValueError, AttributeError) as error:
        raise _invalid("logit_bias", biases, str(error)) from error


def _set(message: Any, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise _invalid(name, value, str(error)) from error


def _extend(field: Any, values: Sequence[object], *, name: str) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError) as error:
        raise _invalid(name, values, str(error)) from error


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(name, value, "must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _invalid(name, value, "is not UTF-8") from error
    return value


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value) if value else ""
    except (TypeError, ValueError) as error:
        raise _invalid(name, value, f"is not JSON: {error}") from error


def _invalid(name: str, value: object, why: str) -> InvalidArgument:
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return InvalidArgument(f"{name}={shown}: {why}", code=grpc.StatusCode.INVALID_ARGUMENT)
