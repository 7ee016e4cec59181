import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import demo_model
from quire.worker.bench.workload import (
    Workload,
    infinite_cache_hits,
    read_workload,
    synthetic_workload,
)
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.text.tokenizer import Tokenizer


def synthetic(**changed: int) -> Workload:
    shape = {"num_prefixes": 3, "prefix_len": 10, "own_len": 5, "output_len": 4}
    shape |= {"num_requests": 8, "seed": 1}
    return synthetic_workload(**{**shape, "vocab_size": 100, **changed})


def read(file: Path, *lines: Any, limit: int | None = None) -> Workload:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts))
    return read_workload(
        file, tokenizer=lambda: Tokenizer.load(demo_model.PATH), output_len=7, limit=limit
    )


def test_synthetic_requests_begin_with_one_of_the_system_prompts_in_equal_shares() -> None:
    workload = synthetic()
    prefixes = [item.token_ids[:10].tobytes() for item in workload.items]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [2, 3, 3]
    assert len({item.token_ids[10:].tobytes() for item in workload.items}) == 8
    assert workload.num_tokens == 8 * (10 + 5 + 4)
    assert workload.longest == 19


def test_a_seed_makes_the_same_workload_again() -> None:
    first, again, other = (
        [item.token_ids.tolist() for item in synthetic(seed=seed).items] for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("name", ["num_prefixes", "own_len", "output_len", "num_requests"])
def test_a_synthetic_workload_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}=0: must be 1 or more"):
        synthetic(**{name: 0})


def test_a_line_is_a_text_a_chat_or_token_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(demo_model.PATH)
    chat = [{"role": "user", "content": "What is a harbor?"}]
    workload = read(
        tmp_path / "own.jsonl",
        {"prompt": "A harbor is", "max_tokens": 3},
        {"messages": chat},
        "",
        {"prompt_token_ids": [5, 6], "id": "other keys are left alone"},
    )
    assert [item.token_ids.tolist() for item in workload.items] == [
        tokenizer.encode("A harbor is"),
        tokenizer.apply_chat_template(chat),
        [5, 6],
    ]
    assert [item.max_tokens for item in workload.items] == [3, 7, 7]


def test_a_line_can_be_the_body_of_a_request_to_openais_api(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a harbor?"}]
    plain, *bodies = read(
        tmp_path / "own.jsonl",
        {"messages": [{"role": "user", "content": "What is a harbor?"}]},
        {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 5},
        {"model": "m", "prompt": "A harbor is", "max_tokens": None},
    ).items
    assert bodies[0].token_ids.tolist() == plain.token_ids.tolist()
    assert [body.max_tokens for body in bodies] == [5, 7]


def test_a_limit_takes_the_first_requests(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [number]} for number in range(5)]
    workload = read(tmp_path / "own.jsonl", *lines, limit=2)
    assert [item.token_ids.tolist() for item in workload.items] == [[0], [1]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('"a text"', "an object with one of prompt, messages, prompt_token_ids"),
        ({"text": "hello"}, "an object with one of prompt, messages, prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "with one of"),
        ({"prompt": 3}, "prompt must be a string, not 3"),
        ({"prompt_token_ids": [1, "2"]}, "a list of integers, 0 or more"),
        ({"prompt_token_ids": [-1]}, "a list of integers, 0 or more"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hello"]}, "a list of objects with role and content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "send parts of type 'text'",
        ),
        ({"prompt_token_ids": [1], "max_tokens": 0}, "max_tokens=0: must be an integer, 1 or"),
        ({"prompt_token_ids": [1], "max_tokens": "9"}, "max_tokens='9'"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"own\.jsonl, line 2: ") as error:
        read(tmp_path / "own.jsonl", {"prompt_token_ids": [1]}, line)
    assert message in str(error.value)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="has no requests"):
        read(tmp_path / "own.jsonl", "")
    with pytest.raises(InvalidRequest, match=r"nowhere\.jsonl"):
        read_workload(
            tmp_path / "nowhere.jsonl",
            tokenizer=lambda: Tokenizer.load(demo_model.PATH),
            output_len=1,
        )


def test_an_endless_cache_has_every_full_block_of_earlier_requests() -> None:
    shared = list(range(8))
    requests = [
        (as_token_ids([*shared, 50]), as_token_ids([60, 61, 62, 63])),
        (as_token_ids([*shared, 51]), as_token_ids([60])),  # Both shared blocks.
        (as_token_ids(shared), as_token_ids([60])),  # The last token is computed: one block.
        # The first request's answer too, but its last token, 63, never had KV.
        (as_token_ids([*shared, 50, 60, 61, 62, 63, 64, 65, 66, 67]), as_token_ids([60])),
    ]
    assert infinite_cache_hits(requests, block_size=4) == [0, 8, 4, 12]
    assert infinite_cache_hits(requests, block_size=8) == [0, 8, 0, 8]
    assert infinite_cache_hits(requests, block_size=16) == [0, 0, 0, 0]


def test_larger_blocks_never_find_more() -> None:
    requests = [(item.token_ids, as_token_ids([1])) for item in synthetic(prefix_len=70).items]
    hits = [sum(infinite_cache_hits(requests, block_size=size)) for size in (4, 8, 16, 32, 64)]
    assert hits == sorted(hits, reverse=True)
    assert hits[0] == 5 * 68  # Three of the eight are the first with their system prompt.
    assert np.array(hits).min() == 5 * 64
