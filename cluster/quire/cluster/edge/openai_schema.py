"""Request bodies of OpenAI's completions and chat API, with the fields that are served."""

import reprlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, create_model

from quire.cluster.dialects.tools import ToolUse, check_tool_use
from quire.cluster.edge.openai_messages import MANY, ChatTurn
from quire.cluster.edge.served_fields import Body
from quire.cluster.edge.structured import FIELDS, constraint_of, told_of
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import MAX_MESSAGES, Chat, Prompt, Text, Tokens
from quire.worker.request.sampling_params import PARAMETERS, SamplingParams

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Texts = Annotated[list[str], MANY]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
_JSON: Mapping[object, Any] = {
    Sequence[int]: TokenIds,
    Sequence[str]: Texts,
    Mapping[int, float]: dict[str, Any],
}
"""The JSON types of sampling parameters whose type differs in bodies; the others are unchanged."""


class StreamOptions(Body):
    accepted = frozenset({"include_obfuscation"})  # A hint: it hides the lengths of tokens.

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    """vLLM's: each event has the usage so far."""


def _with_parameters(body: type["GenerationBody"]) -> type["GenerationBody"]:
    """``body`` plus the sampling parameters that neither it nor each endpoint declares itself."""
    declared = {*body.model_fields, "max_tokens", "logprobs"}
    fields: dict[str, Any] = {
        name: (reduce(or_, [_JSON.get(each, each) for each in (*rule.types, None)]), None)
        for name, rule in PARAMETERS.items()
        if rule.over_http and name not in declared
    }
    return create_model(body.__name__, __base__=body, **fields)


_DAY_S = 86_400.0


@_with_parameters
class GenerationBody(Body):
    """Fields that all endpoints share. Many are vLLM's extensions of the API. ``timeout`` is
    Quire's own: seconds from the request's arrival to its last token."""

    accepted = frozenset(
        {
            *("user", "metadata", "safety_identifier"),  # OpenAI's own records.
            *("prediction", "cache_prompt", "keep_alive"),  # Hints, for speed.
            # OpenRouter's choice of a provider, and its form of include_usage.
            *("provider", "route", "transforms", "usage"),
        }
    )
    unserved = frozenset(
        {
            *("store", "client_metadata"),  # Nothing is kept.
            "verbosity",
        }
    )
    parts: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    timeout: float | None = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is only allowed when stream is false", param="prompt_logprobs"
            )

    @property
    def keep_s(self) -> float:
        """How long the prompt stays cached at least, in seconds. Raises InvalidRequest."""
        return _DAY_S if self.prompt_cache_retention == "24h" else 0.0

    @property
    def forms(self) -> dict[str, Any]:
        """The fields that ask for structured output, by name."""
        return {name: getattr(self, name, None) for name in FIELDS}

    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """One entry for each prompt. Raises InvalidRequest if there is none."""

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """A chat's tools and tool choice; ``None`` for other requests. Raises InvalidRequest."""
        return None

    @abstractmethod
    def params(self) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequest if a value is out of range."""

    def _params(self, **values: object) -> SamplingParams:
        """The sampling parameters. A missing field takes its default; without ``max_tokens`` the
        answer may fill the context."""
        values = {name: getattr(self, name) for name in _SHARED} | values
        with told_of(self.forms):
            values["structured_outputs"] = constraint_of(self.forms)
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        if given.get("seed") == -1:  # Some clients send -1 for "no seed".
            del given["seed"]
        if given.get("max_tokens") == -1:  # And for "no limit".
            del given["max_tokens"]
        if given.get("top_p") == 0:  # Only the likeliest token, whatever its share.
            given |= {"top_p": 1.0, "top_k": 1}
        return SamplingParams(**{"max_tokens": None, **given})


_SHARED = PARAMETERS.keys() & GenerationBody.model_fields.keys()
"""The sampling parameters that have the same name at all endpoints."""
# Fields that are not supported, with the values that are accepted. ``None`` counts as absent; any
# other value is refused.
NOWHERE: Mapping[str, tuple[object, ...]] = {
    # OpenAI's.
    "service_tier": ("auto", "default", "flex", "scale", "priority"),
    # vLLM's.
    "allowed_token_strs": (),
    "early_stopping": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "truncation_side": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "return_tokens_as_token_ids": (False,),
    "request_id": (),
    "kv_transfer_params": (),
    "repetition_detection": (),
    "vllm_xargs": (),
    # SGLang's.
    "lora_path": (),
    "session_params": (),
    "no_stop_trim": (False,),
    "custom_logit_processor": (),
}


class CompletionBody(GenerationBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NOWHERE,
        "parallel_tool_calls": (True, False),  # Without tools it has no effect.
        "reasoning_effort": (),
        "suffix": ("",),
        "best_of": (1,),
        "prompt_embeds": (),
        "add_special_tokens": (True,),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "suffix": "write the model's own marks of prefix and suffix into prompt",
    }

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], MANY]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def shows_only_prompt(self) -> bool:
        """OpenAI's way to have a text scored: one token is generated and not shown."""
        return bool(self.echo) and self.max_tokens == 0

    def check(self) -> None:
        super().check()
        if self.echo and self.stream and self.logprobs is not None:
            raise InvalidRequest(
                "echo with logprobs is only allowed when stream is false", param="echo"
            )

    def prompts(self) -> list[Prompt]:
        """One entry for each prompt: text or token ids."""
        if isinstance(self.prompt, str):
            return [(Text(self.prompt),)]
        if not self.prompt:
            raise InvalidRequest(
                "prompt is empty: send a text or a list of token ids", param="prompt"
            )
        if isinstance(self.prompt[0], int):
            return [(Tokens([token for token in self.prompt if isinstance(token, int)]),)]
        return [
            (Text(entry) if isinstance(entry, str) else Tokens(entry),)
            for entry in self.prompt
            if not isinstance(entry, int)
        ]

    def params(self) -> SamplingParams:
        scores = self.prompt_logprobs
        if scores is None and self.echo:
            scores = self.logprobs
        return self._params(
            max_tokens=1 if self.shows_only_prompt else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=scores,
        )


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_EFFORTS = get_args(Effort)

ChatTurns = Annotated[list[ChatTurn], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatFields(Body):
    """The fields that a chat template reads."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both true: the text ends "
                "either behind the last message or within it",
                param="continue_final_message",
            )

    def chat(self, messages: list[ChatTurn]) -> Chat:
        return Chat(
            [turn.message() for turn in messages],
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self._template_kwargs(),
            tools=[tool.spec for tool in self.tool_use.tools],
        )

    @cached_property
    def tool_use(self) -> ToolUse:
        return check_tool_use(
            self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False
        )

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    def _template_kwargs(self) -> dict[str, Any]:
        effort = self.effort
        if effort is not None and effort not in _EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort={reprlib.repr(effort)}: must be one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
            )
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        return {**given, **(self.chat_template_kwargs or {})}


class ChatBody(ChatFields, GenerationBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NOWHERE,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "echo": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": (),
        "include_reasoning": (True,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
    }

    messages: ChatTurns
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
            )
        PARAMETERS["logprobs"].kept("top_logprobs", self.top_logprobs)

    def prompts(self) -> list[Prompt]:
        """One prompt that holds all messages."""
        return [(self.chat(self.messages),)]

    def params(self) -> SamplingParams:
        max_tokens = self.max_completion_tokens
        with sent_as("max_tokens", "max_completion_tokens", unless=max_tokens is None):
            return self._params(
                max_tokens=self.max_tokens if max_tokens is None else max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )


@contextmanager
def sent_as(ours: str, theirs: str, *, unless: bool = False) -> Iterator[None]:
    """Makes errors name the field ``ours`` by the name that the client sent, ``theirs``, unless
    ``unless``."""
    try:
        yield
    except InvalidRequest as error:
        if unless or error.param != ours:
            raise
        raise error.renamed(theirs) from error
