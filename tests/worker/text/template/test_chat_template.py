"""Messages are converted to the form that a chat template reads, which is found by probing it."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'].strip() }}<|end|>{% endfor %}"
    "<|assistant|>"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
# Reasoning within content is rendered separately, as in Qwen3's templates.
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set text = m.content %}"
    "{% if m.role == 'assistant' %}<think>\n"
    "{% if '</think>' in text %}{{ text.split('</think>')[0].split('<think>')[-1].strip('\n') }}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "\n</think>\n\n{{ text.lstrip('\n') }}{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
)
MARKS = ["<|im_start|>assistant\n", "<|im_end|>\n", "<think>\n", "\n</think>\n\n", "<tool_call>\n"]
MARKS += ["[INST] ", " [/INST]", " </s>", "<|end|><|assistant|>"]
ROLES_KNOWN = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}"
    "{% elif m.role == 'system' %}[S]{{ m.content }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi?"}
# Ways in which known models' templates treat a message with calls and no text.
CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}{% endfor %}"
NULLS = {
    "is written": "{{ m.content }}" + CALLS,  # GLM-4.6, MiniMax-M2.
    "is asked for": "{% if m.content is none %}" + CALLS + "{% endif %}",  # DeepSeek.
    "is searched": "{% if '<t>' in m.content %}{{ m.content }}{% endif %}" + CALLS,  # gpt-oss.
    "is added": "{{ '' + m['content'] }}" + CALLS,  # Ministral 3, Llama 4.
    "may be missing": "{% if m.content is defined %}{{ m.content }}{% endif %}" + CALLS,
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"})


@pytest.mark.parametrize("source", [CHATML, TRIMMED, HEADERS])
@given(content=st.text(st.sampled_from("<|>endimstar_ \n"), min_size=1) | st.text(min_size=1))
def test_a_prefill_stands_in_the_prompt_once_whatever_marks_it_is_made_of(
    source: str, content: str
) -> None:
    chat: list[Any] = [USER, {"role": "assistant", "content": content}]
    if not content.strip():
        with pytest.raises(InvalidRequest, match="the last message has no text"):
            template(source).render(chat, continue_final_message=True)
        return
    whole: Any = render_jinja_template([chat], chat_template=source)
    (ended,) = whole[0]
    text = template(source).render(chat, continue_final_message=True)
    shown = content if source == CHATML else content.strip()
    assert text.endswith(shown)
    assert ended.startswith(text)
    assert ended[len(text) :] in ("<|im_end|>\n", "<|end|><|assistant|>")


@pytest.mark.parametrize("source", [CHATML, TRIMMED, HEADERS, INST, THOUGHTS])
def test_a_prefill_of_any_part_of_a_mark_ends_the_prompt(source: str) -> None:
    rendered = template(source)
    strips: dict[str, Any] = {CHATML: str, THOUGHTS: lambda text: text.lstrip("\n")}
    strip = strips.get(source, str.strip)
    parts = {
        mark[start:end]
        for mark in MARKS
        for start in range(len(mark))
        for end in range(start + 1, len(mark) + 1)
    }
    for content in filter(str.strip, parts):
        chat: list[Any] = [USER, {"role": "assistant", "content": content}]
        text = rendered.render(chat, continue_final_message=True)
        marked: Any = render_jinja_template(
            [[USER, {"role": "assistant", "content": "quire"}]], chat_template=source
        )
        before = marked[0][0].partition("quire")[0]
        if source == THOUGHTS and "</think>" in content:  # Behind its place is the text's.
            assert text == before
        else:
            assert text == before + strip(content), content


def test_a_prefill_that_the_template_shows_twice_or_not_at_all_is_refused() -> None:
    chat = [USER, {"role": "assistant", "content": "So"}]
    for source in ("{{ messages[-1].content }} {{ messages[-1].content }}", "nothing"):
        with pytest.raises(InvalidRequest, match="the last message has no text that the chat"):
            template(source).render(chat, continue_final_message=True)


@pytest.mark.parametrize("source", NULLS.values(), ids=NULLS)
@pytest.mark.parametrize("given", [{"content": None}, {}])
def test_a_call_without_text_is_shown_and_no_none(source: str, given: dict[str, None]) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [call], **given}]
    source = "{% for m in messages %}" + source + "{% endfor %}"
    assert template(source).render(chat) == "<call>f"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, USER]
    assert template(ROLES_KNOWN).render(chat) == "[S]Be brief.[U]Hi?"
    knows = ROLES_KNOWN.replace("'system'", "'developer'").replace("[S]", "[D]")
    assert template(knows).render(chat) == "[D]Be brief.[U]Hi?"
    raises = "{% if messages[0].role == 'developer' %}{{ raise_exception('?') }}{% endif %}"
    assert template(raises + ROLES_KNOWN).render(chat) == "[S]Be brief.[U]Hi?"


ALTERNATING = (
    "{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As of Mistral's and Gemma's: a user's turns and the assistant's alternate."""


def said(*turns: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), turn.split(" ", 1), strict=True)) for turn in turns]


@pytest.mark.parametrize("role", ["User", "robot", "", "content_type", 7, None, ["user"]])
def test_an_unknown_role_is_refused(role: object) -> None:
    chat: list[Any] = [USER, {"role": role, "content": "x"}]
    for source in (ROLES_KNOWN, CHATML):
        with pytest.raises(InvalidRequest, match=r"messages\[1\].role=.*must be one of system"):
            template(source).render(chat)


def test_a_role_that_the_template_names_is_shown() -> None:
    source = ROLES_KNOWN.replace(
        "{% elif", "{% elif m.role == 'ipython' %}[I]{{ m.content }}{% elif"
    )
    assert template(source).render(said("user a", "ipython b")) == "[U]a[I]b"


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for chat in (
        said("system a", "user b"),
        said("user a", "tool b"),
        said("developer a", "user b"),
    ):
        with pytest.raises(InvalidRequest, match="shows no message of the role"):
            template(only_users).render(chat)
    assert template(only_users).render(said("system ", "user b")) == "b"
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls: list[Any] = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="does not show tool_calls"):
        template(CHATML).render(calls)


def test_a_system_message_behind_others_is_shown() -> None:
    chat = said("system a", "user b", "assistant c", "developer d", "user e")
    assert template(ALTERNATING).render(chat) == "[S]a\n\nd[user]b[assistant]c[user]e"
    assert template(ALTERNATING).render(chat[1:]) == "[S]d[user]b[assistant]c[user]e"
    for role in ("system", "developer"):  # Only the first one is shown, as in gpt-oss's template.
        first = f"{{% if messages[0].role == '{role}' %}}{{{{ messages[0].content }}}}{{% endif %}}"
        shown = template(first + ROLES_KNOWN.replace("system", "none")).render(
            [
                {**message, "role": role} if message["content"] in "ad" else message
                for message in chat
            ]
        )
        assert shown == "a\n\nd[U]b[U]e"
    assert template(ROLES_KNOWN).render(chat) == "[S]a[U]b[S]d[U]e"  # It shows them in place.


LAST_SYSTEM_FIRST = (
    "{% set n = namespace(system='') %}"
    "{% for m in messages if m.role == 'system' %}{% set n.system = m.content %}{% endfor %}"
    "{{ n.system }}{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}{% endfor %}"
    "{% elif m.role == 'assistant' %}[A]{{ m.content }}{% elif m.role == 'tool' %}"
    "[T]{{ m.content }}{% endif %}{% endfor %}"
)
"""As of DeepSeek-R1: a system message hides those before it, and content hides calls."""


def test_a_system_message_that_a_later_one_hides_is_shown() -> None:
    for chat in (said("system a", "system b", "user c"), said("system a", "user c", "system b")):
        assert template(LAST_SYSTEM_FIRST).render(chat) == "a\n\nb[U]c"
    assert template(LAST_SYSTEM_FIRST).render(said("user c", "system b")) == "b[U]c"


def test_a_call_that_its_content_hides_is_shown() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "r"}
    for content, shown in (("", ""), ("a", "[A]a")):
        calls: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
        text = template(LAST_SYSTEM_FIRST).render([USER, calls, result])
        assert text == f"[U]Hi?{shown}<call>f[T]r"


def test_a_system_message_alone_is_shown_or_refused() -> None:
    assert template(ROLES_KNOWN).render(said("system a")) == "[S]a"
    to_user = (
        "{% for m in messages[1:] %}{{ messages[0].content if loop.first }}{{ m.content }}"
        "{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="shows a system message only with a user's"):
        template(to_user).render(said("system a"))


def test_turns_of_one_role_are_joined_where_the_template_refuses_them() -> None:
    chat = said("user a", "user b", "assistant c", "assistant d", "system e", "user f")
    text = "[S]e[user]a\n\nb[assistant]c\n\nd[user]f"
    assert template(ALTERNATING).render(chat) == text
    assert template(ROLES_KNOWN).render(said("user a", "user b")) == "[U]a[U]b"
    named = [{"role": "user", "content": "a", "name": "x"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest, match="alternate"):
        template(ALTERNATING).render(named)


def test_functions_of_the_older_api_are_calls_of_tools() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }} "
        "{{ c.function.arguments | tojson }}{% endfor %}{% if m.role == 'tool' %}, {{ m.name }} "
        "{{ m.tool_call_id }} {{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"name": "f", "arguments": '{"a": 1}'}
    chat: list[Any] = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "2"},
    ]
    assert template(source).render(chat) == 'call00000 f {"a": 1}, f call00000 2'


@pytest.mark.parametrize("text", ['{"city": "Zür', "[1]", "7", "null", "x"])
def test_arguments_that_are_no_object_are_shown_by_templates_that_go_through_them(
    text: str,
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    arguments = "messages[0].tool_calls[0].function.arguments"
    source = f"{{% for k, v in {arguments} | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}"
    assert template(source).render(chat) == f"arguments={text}"
    assert template(f"{{{{ '' + {arguments} }}}}").render(chat) == text


def test_what_training_learns_from_is_rendered_like_other_text() -> None:
    source = (
        "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}"
        "{{ x }}"
        "{%- endgeneration %}{{ x }}{% endfor %}"
    )
    theirs: Any = render_jinja_template([[USER, USER]], chat_template=source)
    assert template(source).render([USER, USER]) == theirs[0][0] == "Hi?21Hi?21"


@pytest.mark.parametrize("place", ["config", "files", "processor"])
def test_a_template_for_tools_is_used_with_tools(tmp_path: Path, place: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.save(str(tmp_path / "tokenizer.json"))
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
        {"name": "rag", "template": "rag"},
    ]
    if place == "config":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    elif place == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    else:
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        for entry in named[1:]:
            file = tmp_path / "additional_chat_templates" / f"{entry['name']}.jinja"
            file.write_text(entry["template"])
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render_chat([USER]) == "plain"
    assert loaded.render_chat([USER], tools=[{"type": "function"}]) == "tools 1"
    assert loaded.template is not None
    with zipfile.ZipFile(io.BytesIO(loaded.as_zip())) as files:
        files.extractall(tmp_path / "copy")
    again = Tokenizer.load(tmp_path / "copy")
    assert again.render_chat([USER]) == "plain"
    assert again.render_chat([USER], tools=[{"type": "function"}]) == "tools 1"
    assert loaded.template.text == "plaintools {{ tools | length }}"
    own = Tokenizer.load(tmp_path, chat_template="mine")
    assert own.render_chat([USER], tools=[{"type": "function"}]) == "mine"
    with pytest.raises(CheckpointError, match="the chat template cannot be read"):
        Tokenizer.load(tmp_path, chat_template="{% if")
