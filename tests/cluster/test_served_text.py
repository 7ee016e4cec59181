"""Served text, log-probabilities and echo, compared with the library's decoding of all tokens."""

from typing import Any

import pytest
from tests.tokenizer_kinds import SCRIPTS, made

from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture(
    params=["llama2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt2", "unigram"))]
)
def kind(request: pytest.FixtureRequest, model: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tokenizer that the cluster serves; `says` scripts its model."""
    kind: str = request.param
    tokenizer = Tokenizer(made(kind), chat_template="{{ messages[0].content }}</s>")
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    monkeypatch.setattr(model, "eos", made(kind).token_to_id("</s>"))
    return kind


def says(model: Any, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    monkeypatch.setattr(model, "next_token", lambda context, **_: ids[len(context)], raising=False)


@pytest.mark.quick_cells("Latin", "Devanagari", "Thai", "Han")
@pytest.mark.parametrize("script", SCRIPTS)
async def test_text_bytes_and_places_are_those_of_the_whole(
    kind: str, script: str, model: Any, start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(kind)
    ids = backend.encode(SCRIPTS[script]).ids
    says(model, monkeypatch, ids)
    async with start_cluster(num_groups=1) as cluster:
        cuts = (cut for cut in range(len(ids) // 3, len(ids)))
        cut = next(cut for cut in cuts if "\ufffd" not in backend.decode(ids[:cut]))
        whole, before = backend.decode(ids), backend.decode(ids[:cut])
        asked = {
            "model": "hash",
            "prompt": ids[:cut],
            "max_tokens": len(ids) - cut,
            "logprobs": 3,
            "extra_body": {"ignore_eos": True},
        }
        plain = await cluster.openai.completions.create(**asked)
        stopped = await cluster.openai.completions.create(**asked, stop=["\0\0"])
        echoed = await cluster.openai.completions.create(**asked, echo=True)
        stream = await cluster.openai.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert plain.choices[0].text == stopped.choices[0].text == whole[len(before) :]
        assert "".join(chunk.text for chunk in chunks) == whole[len(before) :]
        _check_places(plain.choices[0].logprobs, plain.choices[0].text)
        streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs]
        for name in ("tokens", "text_offset", "top_logprobs"):
            joined = [each for part in streamed for each in getattr(part, name)]
            assert joined == getattr(plain.choices[0].logprobs, name)
        shown = echoed.choices[0]
        assert shown.text.removeprefix("<s>").lstrip() == whole.lstrip()
        _check_places(shown.logprobs, shown.text)


def _check_places(logprobs: Any, text: str) -> None:
    joined = b"".join(map(_bytes, logprobs.tokens))
    assert joined.decode() == text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset:].encode().startswith(b"" if "bytes:" in token else token.encode())
    places = [len(joined[:at].decode(errors="ignore")) for at in _starts(logprobs.tokens)]
    assert logprobs.text_offset == places
    for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True):
        assert top is None or (top[token] == -0.5 and len(top) == 3)


def _starts(tokens: list[str]) -> list[int]:
    return [sum(len(_bytes(each)) for each in tokens[:at]) for at in range(len(tokens))]


def _bytes(token: str) -> bytes:
    """A token in OpenAI's form."""
    if token.startswith("bytes:"):
        return bytes(int(each, 16) for each in token.removeprefix("bytes:\\x").split("\\x"))
    return token.encode()


@pytest.mark.slow
async def test_the_bytes_of_a_chats_tokens_are_its_text(
    kind: str, model: Any, start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, messages = made(kind), [{"role": "user", "content": "the cat"}]
    prompt = model.tokenizer.apply_chat_template(messages)
    async with start_cluster(num_groups=1) as cluster:
        for text in SCRIPTS.values():
            ids = backend.encode(text, add_special_tokens=False).ids
            says(model, monkeypatch, [*prompt, *ids, model.eos])
            asked = {"model": "hash", "messages": messages, "logprobs": True, "top_logprobs": 2}
            answer = await cluster.openai.chat.completions.create(**asked)
            stream = await cluster.openai.chat.completions.create(**asked, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            content = answer.choices[0].message.content
            assert backend.decode(prompt) + content == backend.decode([*prompt, *ids])
            assert "".join(chunk.delta.content or "" for chunk in chunks) == content
            tokens = answer.choices[0].logprobs.content
            streamed = [chunk.logprobs.content for chunk in chunks if chunk.logprobs]
            assert [each for part in streamed for each in part] == tokens
            assert b"".join(bytes(token.bytes) for token in tokens).decode() == content
            # The token that ended the text is not part of it.
            assert (tokens[-1].token, tokens[-1].bytes) == ("</s>", [])
            assert all(len(token.top_logprobs) == 2 for token in tokens)


async def test_stop_strings_wait_for_min_tokens(
    kind: str, model: Any, start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = made(kind).encode("the cat the cat the cat", add_special_tokens=False).ids
    says(model, monkeypatch, [*ids[:1], *ids])
    async with start_cluster(num_groups=1) as cluster:
        for min_tokens in (0, len(ids) // 2, len(ids)):
            answer = await cluster.openai.completions.create(
                model="hash",
                prompt=ids[:1],
                stop="cat",
                max_tokens=len(ids),
                extra_body={"min_tokens": min_tokens, "ignore_eos": True},
            )
            assert answer.usage.completion_tokens > min_tokens or min_tokens == len(ids)
            reason = "length" if min_tokens == len(ids) else "stop"
            assert answer.choices[0].finish_reason == reason
