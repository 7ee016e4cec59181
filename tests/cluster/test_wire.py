from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prepared import prepared

from quire.cluster.wire import (
    events_from_proto,
    events_to_proto,
    fetched_from_proto,
    fetched_to_proto,
    format_from_proto,
    format_to_proto,
    params_from_proto,
    params_to_proto,
    prepared_of,
    source_to_proto,
    tokens_from_bytes,
    tokens_to_bytes,
    work_of,
)
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.events import MAX_TIERS, BlocksRemoved, BlocksStored, Digest, EventBatch
from quire.worker.blocks.hashing import BlockHash, BlockHashes, Feature, TokenIds, as_token_ids
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.outputs import Fetched
from quire.worker.request.request import Prepared, Task
from quire.worker.request.sampling_params import MAX_SEED, SamplingParams
from quire.worker.request.structured import Constraint, ConstraintKind

hashes = st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), min_size=1, max_size=3)
events = st.one_of(
    st.builds(BlocksStored, hashes.map(tuple), st.integers(0, MAX_TIERS - 1)),
    hashes.map(lambda items: BlocksRemoved(tuple(items))),
)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_the_wire(token_ids: list[int]) -> None:
    assert tokens_from_bytes(tokens_to_bytes(token_ids)).tolist() == token_ids


def test_half_a_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="7 bytes"):
        tokens_from_bytes(b"1234567")


# Every field of the messages, each with distinct values. A new field fails here until it has values
# and is part of the messages.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 100, width=32),
    "top_p": st.floats(0, 1, width=32, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1, width=32),
    "max_tokens": st.integers(2**20, 2**32 - 1),
    "min_tokens": st.integers(0, 2**20),
    "seed": st.integers(0, MAX_SEED),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 20),
    "presence_penalty": st.floats(-2, 2, width=32),
    "frequency_penalty": st.floats(-2, 2, width=32),
    "repetition_penalty": st.floats(0.125, 100, width=32),
    "logit_bias": st.none()
    | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100, width=32), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3),
    "bad_words": st.lists(st.text("ab \u2581", max_size=5).map("x{}".format), max_size=3),
    "bad_words_token_ids": st.lists(
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3), max_size=3
    ),
    "logprob_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3),
    "thinking_token_budget": st.none() | st.integers(0, 2**31 - 1),
    "thinking_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=2),
    "structured_outputs": st.none()
    | st.builds(Constraint, st.sampled_from(get_args(ConstraintKind)), st.text(min_size=1)),
    "truncate_prompt_tokens": st.none() | st.just(-1) | st.integers(1, 2**31 - 1),
    "logprob_start_len": st.integers(0, 9),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(as_token_ids)
TRAVELS: dict[str, st.SearchStrategy[Any]] = {
    "prompt_token_ids": st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=12).map(
        as_token_ids
    ),
    "features": st.sampled_from(
        [
            (),
            (Feature(begin=0, num_tokens=9, digest=b"a" * 32),),
            (
                Feature(begin=1, num_tokens=2, digest=b"a" * 32),
                Feature(begin=3, num_tokens=1, digest=b"b" * 32),
                Feature(begin=6, num_tokens=3, digest=b"a" * 32),
            ),
        ]
    ),
    "adapter": st.text(max_size=9),
    "sampling": st.builds(SamplingParams, **SAMPLING),
    "cache_salt": st.text(max_size=9),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "tenant": st.text(max_size=9),
    "task": st.sampled_from(get_args(Task)),
    "keep_s": st.floats(0, 1e6, width=32),
}
STAYS = {
    "key_name",
    *("client_id", "explain_routing", "shown_token_ids", "hashes", "model", "is_checked"),
    *("cache_key", "source", "progress", "reasoning"),
    *("arrival_s", "deadline_s", "outputs"),
}


def test_every_field_of_a_request_travels_or_stays_with_the_gateway() -> None:
    assert (
        SAMPLING.keys() == names(SamplingParams) == {*pb.SamplingParams.DESCRIPTOR.fields_by_name}
    )
    of_the_attempt = {"request_id", "completion", "resumed_token_ids", "source"}
    assert TRAVELS.keys() | of_the_attempt | STAYS == names(Prepared)
    sent = {*group_pb2.Work.DESCRIPTOR.fields_by_name} - {"segments"}
    assert TRAVELS.keys() - {"prompt_token_ids", "features"} == sent


@given(st.fixed_dictionaries(SAMPLING))
def test_sampling_survives_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    data = params_to_proto(params).SerializeToString()
    assert params_from_proto(pb.SamplingParams.FromString(data)) == params


SOURCES = st.builds(
    PeerSource,
    group_id=st.text(max_size=5),
    address=st.text(max_size=5),
    token=st.text(max_size=5),
    certificate=st.text(max_size=5),
    num_blocks=st.integers(0, 2**32 - 1),
)


@given(st.fixed_dictionaries(TRAVELS), token_ids, st.none() | SOURCES)
def test_a_request_survives_the_wire(
    values: dict[str, Any], resumed: TokenIds, source: PeerSource | None
) -> None:
    request = Prepared(**values, request_id="r", client_id="c", explain_routing=True)
    work = work_of(request)
    for completion in request.completions():
        submit = group_pb2.Submit(
            work=work,
            completion=completion.completion,
            resumed_token_ids=tokens_to_bytes(resumed),
            source=source_to_proto(source) if source else None,
        )
        came = prepared_of(submit, request_id="mine")
        for name in values:
            assert_same(getattr(came, name), getattr(completion, name))
        assert_same(came.resumed_token_ids, resumed)
        assert came.source == source
        assert (came.request_id, came.client_id, came.is_checked) == ("mine", "", True)


@pytest.mark.parametrize("max_tokens", [1, SamplingParams().max_tokens, 40])
def test_a_group_that_hands_over_ends_after_so_many_more_tokens(max_tokens: int) -> None:
    work = work_of(prepared("r", [1], seed=1, max_tokens=max_tokens))
    submit = group_pb2.Submit(
        work=work, resumed_token_ids=tokens_to_bytes([7, 8]), hand_over_after=1
    )
    assert prepared_of(submit, request_id="r").sampling.max_tokens == min(3, max_tokens)


def test_formats_and_what_was_fetched_survive_the_wire() -> None:
    format = KvFormat(num_layers=1, num_kv_heads=2, head_bytes=3, block_size=4)
    assert format_from_proto(format_to_proto(format)) == format
    fetched = Fetched(1, 2, 3, 0.5, "a reason")
    assert fetched_from_proto(fetched_to_proto(fetched)) == fetched


def test_what_is_no_work_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="work of 3 bytes is broken"):
        prepared_of(group_pb2.Submit(work=b"abc"), request_id="r")


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def assert_same(value: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert value.dtype == expected.dtype
        value, expected = value.tolist(), expected.tolist()
    assert value == expected


def test_fields_that_are_not_set_take_their_defaults() -> None:
    assert params_from_proto(pb.SamplingParams()) == SamplingParams()
    assert params_from_proto(pb.SamplingParams(temperature=0)) == SamplingParams(temperature=0)


@given(
    st.one_of(
        st.builds(
            EventBatch,
            epoch=st.integers(0, 2**64 - 1),
            first_seq=st.integers(0, 2**63),
            events=st.lists(events, max_size=4).map(tuple),
        ),
        st.builds(
            EventBatch,
            epoch=st.integers(0, 9),
            first_seq=st.integers(0, 9),
            snapshot=st.one_of(st.just([]), hashes).map(BlockHashes.of),
            slower=st.lists(hashes.map(BlockHashes.of), max_size=MAX_TIERS - 1).map(tuple),
            buckets=st.one_of(st.none(), st.binary(max_size=3)),
            digest=st.one_of(
                st.none(),
                st.builds(
                    lambda value, num_tiers: Digest(bytes([value]) * 2048 * num_tiers),
                    st.integers(0, 255),
                    st.integers(1, MAX_TIERS),
                ),
            ),
        ),
    )
)
def test_events_survive_the_wire(batch: EventBatch) -> None:
    data = events_to_proto(batch).SerializeToString()
    assert events_from_proto(group_pb2.EventBatch.FromString(data)) == batch


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (group_pb2.EventBatch(digest=bytes(9)), "digest of 9 bytes: must have 2048"),
        (group_pb2.EventBatch(digest=b""), "digest of 0 bytes: must have 2048"),
        (group_pb2.EventBatch(digest=bytes(8192)), "digest of 8192 bytes: .* 1 to 3 tiers"),
        (group_pb2.EventBatch(snapshot=group_pb2.Snapshot(slower=[b""] * 3)), "of 4 tiers"),
        (group_pb2.EventBatch(snapshot=group_pb2.Snapshot(slower=[bytes(34)])), "34 bytes"),
        (group_pb2.EventBatch(events=[group_pb2.BlockEvent(stored=bytes(32), tier=3)]), "tier=3"),
        (group_pb2.EventBatch(snapshot=group_pb2.Snapshot(stored=bytes(33))), "33 bytes"),
        (group_pb2.EventBatch(events=[group_pb2.BlockEvent(removed=bytes(31))]), "31 bytes"),
    ],
)
def test_bytes_that_are_no_hashes_or_digest_and_tiers_that_are_none_are_refused(
    message: group_pb2.EventBatch, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        events_from_proto(message)
