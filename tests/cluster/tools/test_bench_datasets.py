"""Prompts of ``quire bench serve``: their lengths, what they share, and files that are none."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from quire.cluster.tools.bench.serving.config import Dataset
from quire.cluster.tools.bench.serving.dataset import Prompt, Vocabulary, arrivals, prompts_of
from quire.worker.request.errors import ConfigError

GUESSED = Vocabulary.guessed()


def ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    contents = []
    for prompt in prompts:
        assert isinstance(prompt.content, np.ndarray)
        contents.append(prompt.content.tolist())
    return contents


def test_random_prompts_have_the_lengths_that_were_asked_for_and_one_prefix() -> None:
    dataset = Dataset(
        num_prompts=300,
        random_input_len=20,
        random_output_len=10,
        random_range_ratio=0.5,
        random_prefix_len=7,
    )
    prompts = prompts_of(dataset, GUESSED)
    contents = ids(prompts)
    assert {len(content) - 7 for content in contents} == set(range(10, 31))
    assert {prompt.max_tokens for prompt in prompts} == set(range(5, 16))
    assert len({tuple(content[:7]) for content in contents}) == 1
    assert len({tuple(content[7:]) for content in contents}) == 300
    assert ids(prompts_of(dataset, GUESSED)) == contents
    assert ids(prompts_of(replace(dataset, seed=1), GUESSED)) != contents


def test_a_word_stands_for_each_token_in_texts() -> None:
    prompt = prompts_of(Dataset(num_prompts=1, random_input_len=50), GUESSED)[0]
    assert len(prompt.text.split()) == 50


def test_each_prefix_is_repeated_as_often_as_any_other() -> None:
    dataset = Dataset(
        name="prefix_repetition",
        num_prompts=23,
        prefix_repetition_num_prefixes=5,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=4,
        prefix_repetition_output_len=9,
    )
    prompts = prompts_of(dataset, GUESSED)
    contents = ids(prompts)
    heads = [tuple(content[:6]) for content in contents]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 5, 5, 5]
    assert {len(content) for content in contents} == {10}
    assert {prompt.max_tokens for prompt in prompts} == {9}


def test_prompts_of_a_trace_share_the_blocks_that_its_requests_share(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1030, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    dataset = Dataset(name="trace", path=trace, trace_speed=2.0)
    prompts = prompts_of(dataset, GUESSED)
    first, second, third = ids(prompts)
    assert [len(first), len(second), len(third)] == [1100, 1030, 600]
    assert first[:1024] == second[:1024]
    assert first[:512] == third[:512]
    assert first[1024:1030] != second[1024:]
    assert first[512:600] != third[512:]
    assert [prompt.max_tokens for prompt in prompts] == [5, 6, 7]
    times = arrivals(prompts, request_rate=None, burstiness=1, seed=0)
    assert times == pytest.approx([0, 0.75, 1.0])
    assert len(prompts_of(replace(dataset, num_prompts=2), GUESSED)) == 2


def test_sharegpt_gives_first_messages_of_usual_lengths(tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    file = tmp_path / "sharegpt.json"
    long = "word " * 2000
    talks = [
        talk("a" * 40, "b" * 400),
        talk("lonely" * 9),
        talk(long, "b" * 40),
        talk("a", "b"),
        {},
    ]
    file.write_text(json.dumps(talks))
    prompts = prompts_of(Dataset(name="sharegpt", path=file), GUESSED)
    assert [(prompt.content, prompt.max_tokens) for prompt in prompts] == [("a" * 40, 100)]
    prompts = prompts_of(Dataset(name="sharegpt", path=file, output_len=7), GUESSED)
    assert [prompt.max_tokens for prompt in prompts] == [7]


def test_lines_of_a_file_are_texts_token_ids_or_chats(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "hello", "output_tokens": 3},
        {"prompt": [5, 6, 7], "max_tokens": 4},
        {"prompt_token_ids": [8]},
        {"messages": messages},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    prompts = prompts_of(Dataset(name="custom", path=file), GUESSED)
    assert prompts[0].content == "hello"
    assert ids(prompts[1:3]) == [[5, 6, 7], [8]]
    assert prompts[3].content == messages
    assert [prompt.max_tokens for prompt in prompts] == [3, 4, 256, 256]
    assert not any(prompt.is_made_up for prompt in prompts)
    prompts = prompts_of(Dataset(name="custom", path=file, output_len=9, num_prompts=2), GUESSED)
    assert [prompt.max_tokens for prompt in prompts] == [9, 9]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("custom", "", "no requests in it for custom"),
        ("custom", "{", "line 1: Expecting"),
        ("custom", '\n{"text": "x"}', "line 2: must have prompt"),
        ("custom", "[1]", "line 1: must be an object"),
        ("custom", '{"prompt": ["x"]}', "line 1: prompt must be a text or a list of token ids"),
        ("custom", '{"prompt": [-1]}', "line 1: prompt must be a text or a list of token ids"),
        ("custom", '{"prompt": "x", "output_tokens": 0}', "output_tokens is 0, and must be 1"),
        ("custom", '{"prompt": "x", "output_tokens": "y"}', "output_tokens is 'y', and must be 1"),
        ("sharegpt", "{}", "no requests in it for sharegpt"),
        ("sharegpt", "[1]", "ShareGPT is a JSON list"),
        ("sharegpt", '[{"conversations": [{}]}]', "ShareGPT is a JSON list"),
        ("trace", '{"timestamp": 1}', "request 1, read as mooncake: it has no 'input_length'"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        prompts_of(Dataset(name=name, path=file), GUESSED)
    assert str(file) in str(refused.value)
    assert says in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        prompts_of(Dataset(name=name, path=tmp_path / "none.jsonl"), GUESSED)


def test_a_tokenizer_says_which_ids_there_are_and_how_long_texts_are(tmp_path: Path) -> None:
    words = {"<s>": 0, "the": 1, "sea": 2, "</s>": 3, "?": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        vocabulary = Vocabulary.of(str(path))
        assert vocabulary.ids.tolist() == [1, 2, 4]
        assert vocabulary.count("the sea the sea") == 4
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"give a folder with a tokenizer\.json"):
        Vocabulary.of(str(tmp_path))


def test_arrivals_keep_their_rate_and_are_as_bursty_as_asked() -> None:
    prompts = [Prompt(content="x", max_tokens=1)] * 20_000

    def gaps(burstiness: float) -> Any:
        times = arrivals(prompts, request_rate=8.0, burstiness=burstiness, seed=3)
        assert times[-1] == pytest.approx(20_000 / 8)
        assert times == sorted(times)
        return np.diff(times) * 8

    # The variance of a gamma distribution of mean 1 is one over its shape.
    for burstiness in (0.25, 1.0, 100.0):
        assert gaps(burstiness).var() == pytest.approx(1 / burstiness, rel=0.1)
    at_once = arrivals(prompts[:3], request_rate=float("inf"), burstiness=1, seed=0)
    assert at_once == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_prompts": 0}, "num_prompts=0: must be 1 or more"),
        ({"random_range_ratio": 1.0}, r"random_range_ratio=1\.0: must be 0 or more, and below 1"),
        ({"trace_speed": 0.0}, r"trace_speed=0\.0: must be above 0"),
        ({"name": "custom"}, "dataset_name=custom: also give --dataset-path"),
        ({"path": Path("x")}, "dataset_path=x: random is made up; give --dataset-name"),
    ],
)
def test_a_dataset_out_of_its_range_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Dataset(**values)
