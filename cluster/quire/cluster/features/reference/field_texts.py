"""What the fields of HTTP bodies mean, for the reference. A field means the same in every body, but
for those of `IN_BODY`; sampling parameters are described where they are declared."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from quire.worker.request.sampling_params import PARAMETERS, SamplingParams
from quire.worker.request.settings import attributes_of

_JSON_SCHEMA = "The output is JSON that fits this schema."
_REGEX = "The whole output matches this regular expression."
_GRAMMAR = "The output matches this grammar, in Lark's or GBNF's syntax."
_TEXTS: Mapping[str, str] = {
    "model": "The name of a served model, an alias or a LoRA adapter. It may be omitted "
    "if only one model is served.",
    "stream": "Stream the answer as server-sent events, the last of which is `[DONE]`.",
    "stream_options": "With `stream`: `include_usage` adds an event with the usage at the end, "
    "`continuous_usage_stats` adds it to each event.",
    "include_usage": "Add an event with the usage at the end.",
    "continuous_usage_stats": "Add the usage so far to each event.",
    "include_obfuscation": "Not supported: events have no padding.",
    "return_token_ids": "Add the token ids of the prompt and of the output.",
    "return_token_strs": "Add the text of each token.",
    "response_format": "The format of the output: `text`, `json_object`, or `json_schema` with a "
    "schema.",
    "structured_outputs": "Constraint of the output, one of `json` (a schema), `regex`, `choice`, "
    "`grammar`, `json_object` and `structural_tag`. vLLM's name.",
    "guided_json": f"{_JSON_SCHEMA} vLLM's former name.",
    "guided_regex": f"{_REGEX} vLLM's former name.",
    "guided_choice": "The output is one of these texts. vLLM's former name.",
    "guided_grammar": f"{_GRAMMAR} vLLM's former name.",
    "json_schema": f"{_JSON_SCHEMA} SGLang's name.",
    "regex": f"{_REGEX} SGLang's name.",
    "ebnf": f"{_GRAMMAR} SGLang's name.",
    "structural_tag": "Parts of the output, marked by tags, have separate constraints.",
    "cache_salt": "This request only shares cached prefixes with requests of the same salt.",
    "priority": "Requests with lower numbers run first. 0 if absent.",
    "prompt_cache_key": "Requests with the same key go to the same group if that costs little.",
    "prompt_cache_retention": "`24h` keeps the prompt's KV for a day, within the tenant's share.",
    "timeout": "Seconds from the request's arrival after which it fails with 504.",
    "prompt": "A text or token ids, or a list of either: each is a prompt of its own.",
    "echo": "Return the prompt before the completion.",
    "messages": "The chat so far, with roles and contents.",
    "max_completion_tokens": "Most tokens to generate, including those of the reasoning.",
    "top_logprobs": "With `logprobs`: how many of the most probable tokens are reported, 0 to 20.",
    "add_generation_prompt": "End the prompt with the beginning of the assistant's turn. True if "
    "absent.",
    "continue_final_message": "The output continues the last message.",
    "chat_template_kwargs": "Further variables of the chat template, such as `enable_thinking`.",
    "reasoning_effort": "`none`, `minimal`, `low`, `medium`, `high` or `xhigh`, if the chat "
    "template uses it.",
    "tools": "Functions that the model may call, each with a JSON schema of its arguments.",
    "tool_choice": "Whether tools are called: `auto`, `none`, `required`, or one function's name.",
    "parallel_tool_calls": "Whether one answer may have several calls. True if absent.",
    "system": "A system prompt, a text or text blocks.",
    "thinking": "Whether the model reasons: a `type` of `enabled`, `disabled` or `adaptive`.",
    "budget_tokens": "Not enforced; `max_tokens` is the limit.",
    "output_config": "`format`, a JSON schema that the output fits, and `effort`.",
    "format": "The format of the output, such as `json_schema` with a schema.",
    "effort": "How much the model reasons, if its chat template uses it.",
    "cache_control": "Type `ephemeral` keeps the prompt's KV cached for its `ttl`, `5m` or `1h`.",
    "stop_sequences": "Strings that end the output and are not part of it.",
    "input": "A text, or the items of a conversation.",
    "instructions": "A system message before the input.",
    "max_output_tokens": "Most tokens to generate; if absent, as many as the context has room for.",
    "text": "`format`: the format of the output.",
    "reasoning": "`effort`: how much the model reasons.",
    "metadata": "Up to 16 keys and values, which the answer returns.",
    "user": "Accepted, without effect.",
    "encoding_format": "`float`, or `base64` of the numbers as little-endian float32.",
    "dimensions": "Keep this many numbers of each vector, the first ones, and normalize them.",
    "truncate": "`END` truncates texts that are too long for the model; `NONE` refuses them.",
    "query": "The text with which documents are compared.",
    "documents": "Texts, or objects with a `text`.",
    "top_n": "Return only this many of the best documents.",
    "return_documents": "Whether the answer has the documents' texts. True if absent.",
    "max_tokens_per_doc": "Most tokens of each document; longer ones are truncated.",
    "text_1": "One text, or as many texts as `text_2` has.",
    "text_2": "One text or several.",
    "tokens": "Token ids.",
    "add_special_tokens": "Add the tokens that the tokenizer puts around a text. True if absent.",
    "lora_name": "Name of the adapter for clients.",
    "lora_path": "A directory that each gateway's node has, or `ORG/NAME[@REVISION]` of the hub.",
    "base_model_name": "The adapter's model, if several take adapters.",
}
IN_BODY: Mapping[tuple[str, str], str] = {
    ("EmbeddingsBody", "input"): "A text or token ids, or a list of either.",
    ("ChatBody", "logprobs"): "Report the log-probability of each token.",
    ("CompletionBody", "logprobs"): "Report the log-probability of each token and of this many "
    "most probable ones.",
    ("MessagesBody", "max_tokens"): "Most tokens to generate.",
}


@cache
def _parameter_docs() -> Mapping[str, str]:
    attributes = attributes_of(SamplingParams).items()
    return {
        name: each.text.replace("``None``", "``null``").replace("``", "`")
        for name, each in attributes
    }


def described(body: str, name: str, field: Mapping[str, Any]) -> dict[str, Any]:
    """``field``, the JSON schema of the field ``name`` of ``body``, with what it means and, for
    sampling parameters, the values that it may have and its default."""
    rule = PARAMETERS.get(name)
    text = IN_BODY.get((body, name)) or _TEXTS.get(name)
    made = {key: value for key, value in field.items() if key not in ("title", "default")}
    if made.get("anyOf"):
        kinds = [each for each in made["anyOf"] if each != {"type": "null"}]
        made = (kinds[0] if len(kinds) == 1 else {"anyOf": kinds}) | {
            key: value for key, value in made.items() if key != "anyOf"
        }
    if rule is not None and text is None:
        text = _parameter_docs().get(name, "")
    if rule is not None and rule.allowed and (body, name) not in IN_BODY:
        text = f"{text} Allowed: {rule.allowed}."
    default = field.get("default")
    if default is None and rule is not None and (body, name) not in IN_BODY:
        default = _DEFAULTS.get(name)
    if default is not None:
        made["default"] = default
    return made | {"description": text} if text else made


_DEFAULTS = {
    name: value
    for name, value in (
        (each, SamplingParams.__dataclass_fields__[each].default) for each in PARAMETERS
    )
    if isinstance(value, (bool, int, float)) and name != "max_tokens"
}
"""What sampling parameters are where neither the request nor the model's generation_config says."""
