"""Compares Quire's rendering of chat templates to transformers': ``python -m tools.templates
[FILE.jinja …]``.

Without files it fetches templates that other projects contain (`tools.strangers`). Both render each
template with several chats. The table shows where they differ, and which formats of tool calls and
reasoning are detected. ``--verbose`` shows each difference.
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tools.strangers import npm, sdist
from transformers.utils.chat_template_utils import render_jinja_template

from quire.cluster.dialects.dialect import choose_dialect
from quire.worker.request.errors import InvalidRequest
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.tokenizer import Tokenizer

SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
_CITY = {"type": "string", "description": "A city."}
_PARAMETERS = {"type": "object", "properties": {"city": _CITY}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": _PARAMETERS},
}
USER = {"role": "user", "content": "How is the weather in Zürich?"}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "tool_call_id": "callA0001", "name": "weather", "content": '{"c": 21}'}


def _call(number: int = 1, **arguments: object) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments or {"city": "Zürich"}}
    return {"id": f"callA000{number}", "type": "function", "function": function}


def _assistant(content: str | None, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CHATS: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "three turns": ([SYSTEM, USER, _assistant("Sunny."), USER], {}),
    "no prompt": ([USER, _assistant("Sunny.")], {"add_generation_prompt": False}),
    "tools": ([USER], {"tools": [TOOL]}),
    "system and tools": ([SYSTEM, USER], {"tools": [TOOL, TOOL]}),
    "call": ([USER, _assistant(None, tool_calls=[_call()]), RESULT], {"tools": [TOOL]}),
    "call and text": ([USER, _assistant("So.", tool_calls=[_call()]), RESULT], {"tools": [TOOL]}),
    "two calls": (
        [
            USER,
            _assistant(None, tool_calls=[_call(1), _call(2, city="Bern", days=[1, 2])]),
            RESULT,
            RESULT | {"tool_call_id": "callA0002"},
        ],
        {"tools": [TOOL]},
    ),
    "after a call": (
        [USER, _assistant(None, tool_calls=[_call()]), RESULT, _assistant("21 °C."), USER],
        {"tools": [TOOL]},
    ),
    "reasoning": ([USER, _assistant("Sunny.", reasoning_content="It is May."), USER], {}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "prefill": ([USER, _assistant("It is ")], {"continue_final_message": True}),
    "prefill of a mark": ([USER, _assistant("<")], {"continue_final_message": True}),
    "prefill of a word": ([USER, _assistant("end")], {"continue_final_message": True}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}], {}),
    "developer": ([{"role": "developer", "content": "Be brief."}, USER], {}),
}


def carried() -> Iterator[tuple[str, str]]:
    """The names and texts of the templates that other projects contain."""
    for folder in (sdist("llama-cpp-python") / "vendor/llama.cpp/models/templates", sdist("vllm")):
        for file in sorted(folder.rglob("*.jinja")):
            if "pooling" not in file.parts:
                yield file.stem, file.read_text(encoding="utf-8")
    script = npm("@huggingface/ollama-utils") / "src/chat-template-automap.ts"
    for model, text in re.findall(
        r'model: "([^"]+)",\s+gguf:\s+("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')', script.read_text()
    ):
        yield model, ast.literal_eval(text)


def theirs(source: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[str]:
    """transformers' renderings: none if the template refuses, and several if clients may write the
    same chat in several ways. Those are: a call's arguments as object or text, missing content as
    None or absent, and the developer role as system if the template drops or refuses it."""
    chats = [chat]
    if chat[0]["role"] == "developer":
        shown = [text for text in [_theirs(source, chat, options)] if text and "Be brief" in text]
        chats = [chat] if shown else [[chat[0] | {"role": "system"}, *chat[1:]]]
    if any("tool_calls" in message for message in chat):
        written = json.loads(json.dumps(chat))
        for call in (call for message in written for call in message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        chats.append(written)
    texts = (_theirs(source, each, options, nulls=n) for n in (False, True) for each in chats)
    return [text for text in texts if text is not None]


def _theirs(
    source: str, chat: list[dict[str, Any]], options: dict[str, Any], *, nulls: bool = False
) -> str | None:
    # transformers' tokenizers remove fields that are None before they render.
    messages = [{k: v for k, v in message.items() if nulls or v is not None} for message in chat]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
    options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    try:
        rendered: Any = render_jinja_template(
            [messages], chat_template=source, **{**SPECIAL_TOKENS, **options}
        )
    except Exception:
        return None
    return str(rendered[0][0])


def ours(template: ChatTemplate, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
    known = ("tools", "add_generation_prompt", "continue_final_message")
    named = {name: options[name] for name in known if name in options}
    rest = {name: value for name, value in options.items() if name not in known}
    sent = json.loads(json.dumps(chat))
    for message in sent:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return template.render(sent, template_kwargs=rest, **named)


def formats_of(source: str) -> tuple[str | None, str | None, str]:
    """The formats of tool calls and of reasoning that Quire detects in a template, and the reason
    if there is none for calls."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = Tokenizer(backend, chat_template=source, special_tokens=SPECIAL_TOKENS)
    dialect = choose_dialect(tokenizer)
    return (
        dialect.calls.name if dialect.calls else None,
        dialect.reasoning.name if dialect.reasoning else None,
        dialect.why_no_calls,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Renders real chat templates and compares.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--verbose", action="store_true", help="show each difference")
    arguments = parser.parse_args()
    named = [(file.stem, file.read_text(encoding="utf-8")) for file in arguments.files]
    unique = {source: name for name, source in reversed(named or [*carried()])}
    total: Counter[str] = Counter()
    rows = []
    for source, name in sorted(unique.items(), key=lambda each: each[1].lower()):
        try:
            template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
        except Exception as error:
            print(f"{name}: not read: {error}")
            total["not read"] += 1
            continue
        counts: Counter[str] = Counter()
        for title, (chat, options) in CHATS.items():
            expected = theirs(source, chat, options)
            try:
                rendered: str | None = ours(template, chat, options)
                reason = ""
            except InvalidRequest as error:
                rendered, reason = None, str(error)
            if rendered in expected:
                verdict = "equal"
            elif not expected:
                verdict = "both refuse" if rendered is None else "only ours renders"
            else:
                verdict = "only ours refuses" if rendered is None else "differs"
            counts[verdict] += 1
            if arguments.verbose and verdict not in ("equal", "both refuse"):
                print(f"--- {name}, {title}: {verdict} {reason}")
                print(
                    "\n".join(
                        [f"theirs: {text!r}" for text in expected] + [f"ours:   {rendered!r}"]
                    )
                )
        total += counts
        uses_tools = "tools" in source and "tool_calls" in source
        rows.append((name, uses_tools, *formats_of(source), counts))
    print(f"{'template':52} {'calls':18} {'reasoning':12} equal refused others")
    for name, uses_tools, calls, reasoning, _, counts in rows:
        others = {k: v for k, v in counts.items() if k not in ("equal", "both refuse")}
        shown = calls or ("NONE FOUND" if uses_tools else "-")
        print(
            f"{name[:52]:52} {shown:18} {reasoning or '-':12} {counts['equal']:5} "
            f"{counts['both refuse']:7} {others or ''}"
        )
    with_tools = [calls for _, uses_tools, calls, *_ in rows if uses_tools]
    for name, uses_tools, calls, _, why, _ in rows:
        if uses_tools and not calls:
            print(f"{name}: {why}")
    print(f"\n{len(rows)} templates, {total.total()} renders: {dict(total)}")
    print(f"{sum(map(bool, with_tools))} of {len(with_tools)} formats of calls found")


if __name__ == "__main__":
    main()
