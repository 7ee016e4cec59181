import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.call_templates import TAKE_TEXT, TEMPLATES
from tests.tokenizer_kinds import loaded
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.text.reasoning import REASONING_FORMATS
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.text_stream import TextStream
from quire.worker.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}\n"
    "<|{{ message.role }}|>{{ message.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Grüß Gott 🌍"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    backend.train_from_iterator(
        ["the cat and the hat, the end. über Straße"] * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_a_chat_is_rendered_as_transformers_renders_it(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    for add_generation_prompt in (True, False):
        ours = tokenizer.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt)
        expected = theirs.apply_chat_template(
            CHAT, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        assert ours == expected
    assert tokenizer.encode("the über 🌍") == theirs.encode("the über 🌍")


@pytest.mark.parametrize("content", ["Sure, ", " the cat", "the cat and\n", "x"])
def test_a_message_is_gone_on_with_as_in_transformers(
    folder: Path, tokenizer: Tokenizer, content: str
) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    chat = [*CHAT, {"role": "assistant", "content": content}]
    for source in (TEMPLATE, TEMPLATE.replace(" | trim", "")):
        theirs.chat_template = source
        expected = theirs.apply_chat_template(chat, continue_final_message=True, tokenize=False)
        ours = ChatTemplate(source, special_tokens={"bos_token": "<|begin|>"})
        assert ours.render(chat, continue_final_message=True) == expected
    with pytest.raises(InvalidRequest, match="the last message has no text"):
        tokenizer.render_chat([{"role": "user", "content": " "}], continue_final_message=True)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_calls_and_tools_are_rendered_as_in_transformers(form: str) -> None:
    source = "{{ tools | tojson if tools is not none else 'none' }}" + TEMPLATES[form]
    ours = ChatTemplate(source, special_tokens={})
    arguments = {"city": "Zürich", "days": [1, None], "sure": True}
    text = json.dumps(arguments, ensure_ascii=False)

    def chat(given: object) -> list[dict[str, Any]]:
        function = {"name": "weather", "arguments": given}
        call = {"type": "function", "id": "123456789", "function": function}
        return [
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
        ]

    rendered: Any = render_jinja_template(
        [chat(text if form in TAKE_TEXT else arguments)], chat_template=source, tools=[WEATHER]
    )
    assert ours.render(chat(text), tools=[WEATHER]) == rendered[0][0]
    assert ours.render(chat(text)).startswith("none")
    assert ours.render(chat("")) == ours.render(chat("{}"))


def test_a_template_may_have_more_variables() -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if thinks %}<think>{% endif %}", special_tokens={}
    )
    assert template.render(CHAT) == "Be brief. "
    assert template.render(CHAT, template_kwargs={"thinks": True}) == "Be brief. <think>"
    with pytest.raises(InvalidRequest, match="'messages': …}: the name is taken"):
        template.render(CHAT, template_kwargs={"messages": []})
    with pytest.raises(InvalidRequest, match="'tools': …}: the name is taken"):
        template.render(CHAT, template_kwargs={"tools": []})


def test_a_template_that_refuses_says_why(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role='wizard': must be one of"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "?"}])
    with pytest.raises(InvalidRequest, match="refuses these messages: not so"):
        ChatTemplate("{{ raise_exception('not so') }}", special_tokens={}).render(CHAT)
    with pytest.raises(InvalidRequest, match="messages is empty"):
        tokenizer.apply_chat_template([])


def test_a_chat_may_have_its_text_in_parts_and_nothing_else(tokenizer: Tokenizer) -> None:
    whole = tokenizer.render_chat([{"role": "user", "content": "What is it?"}])
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == whole
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(InvalidRequest, match="'image_url' is not supported: this model reads text"):
        tokenizer.render_chat([{"role": "user", "content": [image]}])
    for bad in ("hi", ["hi"], [{"content": "hi"}]):
        with pytest.raises(InvalidRequest, match="messages: must be mappings with role and conte"):
            tokenizer.render_chat(bad)  # type: ignore[arg-type]


def test_a_model_without_a_template_says_how_to_go_on(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = Tokenizer.load(tmp_path)
    with pytest.raises(InvalidRequest, match=r"no chat template.*chat_template\.jinja"):
        bare.apply_chat_template(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "Be brief. "


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "unigram"])
@given(
    st.text(alphabet="the cat🌍", max_size=40),
    st.lists(st.text(alphabet="the ca🌍", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 12),
)
def test_the_first_stop_string_to_be_complete_ends_the_text(
    kind: str, text: str, stops: list[str], keep: bool, min_tokens: int
) -> None:
    tokenizer = loaded(kind)
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep, min_tokens=min_tokens)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = _stream(TextStream(tokenizer, SamplingParams()), ids)
    num_kept = len("".join(map(tokenizer.detokenizer().push, ids[:min_tokens])))
    stream = TextStream(tokenizer, params)
    assert _stream(stream, ids) == _cut(shown, stops, keep=keep, num_kept=num_kept)


def test_a_stop_string_within_the_fewest_tokens_is_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(letter)[0] for letter in "abcab"]
    for min_tokens, text in ((1, ""), (2, "abc"), (4, "abc"), (5, "abcab")):
        stream = TextStream(tokenizer, SamplingParams(stop="ab", min_tokens=min_tokens))
        assert _stream(stream, ids) == text


@pytest.mark.parametrize(
    ("prompt", "text", "shown"),
    [
        ("", "<think>the cat</think>the cat", "<think>the cat</think>the "),
        ("", " <think>\nthe cat</think>a", " <think>\nthe cat</think>a"),
        ("", "the cat</think>", "the "),
        ("", "<think>the cat", "<think>the cat"),
        ("", "<thin cat", "<thin "),
        ("", "<thi", "<thi"),
        ("a<think>", "the cat</think>the cat", "the cat</think>the "),
        ("a<think></think>", "the cat", "the "),
    ],
)
def test_a_stop_string_within_reasoning_is_text(
    tokenizer: Tokenizer, prompt: str, text: str, shown: str
) -> None:
    (think,) = (each for each in REASONING_FORMATS if each.name == "think")
    for stops in (["cat"], ["cat", "</think>\n"]):
        stream = TextStream(
            tokenizer,
            SamplingParams(stop=stops),
            follows=tokenizer.encode(prompt),
            reasoning=think,
        )
        assert _stream(stream, tokenizer.encode(text)) == shown


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🌍!")
    stream = TextStream(tokenizer, SamplingParams())
    assert [stream.push(token).text for token in ids] == ["", "", "", "🌍", "!"]


def test_endless_broken_bytes_are_shown_in_the_end(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("🌍")[1:2] * 500
    stream = TextStream(tokenizer, SamplingParams())
    shown = "".join(stream.push(token).text for token in broken) + stream.finish()
    assert shown == tokenizer.decode(broken)


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "the cat and the hat " * 50_000
    num_turns = 0
    turns: list[int] = []

    def encode() -> None:
        turns.append(num_turns)
        tokenizer.encode(text)
        turns.append(num_turns)

    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.0005)
    assert turns[1] - turns[0] > 2  # A held GIL allows 2.


def _stream(stream: TextStream, ids: list[int]) -> str:
    text = ""
    for position, token_id in enumerate(ids):
        delta = stream.push(token_id)
        text += delta.text
        if delta.stopped:
            assert all(stream.push(rest).text == "" for rest in ids[position + 1 :])
            break
    return text + stream.finish()


def _cut(text: str, stops: list[str], *, keep: bool, num_kept: int) -> str:
    """Cuts at the first stop string, tested at each character after the first ``num_kept``."""
    for end in range(num_kept + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[:end] if keep else text[: end - max(map(len, ended))]
    return text
