from dataclasses import fields
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.wire import (
    events_from_proto,
    events_to_proto,
    params_from_proto,
    params_to_proto,
    prepared_of,
    submit_of,
    tokens_from_bytes,
    tokens_to_bytes,
)
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.events import BlocksRemoved, BlocksStored, Digest, EventBatch
from quire.worker.api.hashing import BlockHash, BlockHashes, as_token_ids
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import MAX_SEED, SamplingParams
from quire.worker.api.structured import Constraint, ConstraintKind

hashes = st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), min_size=1, max_size=3)
events = st.one_of(
    hashes.map(lambda items: BlocksStored(tuple(items))),
    hashes.map(lambda items: BlocksRemoved(tuple(items))),
)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_the_wire(token_ids: list[int]) -> None:
    assert tokens_from_bytes(tokens_to_bytes(token_ids)).tolist() == token_ids


def test_half_a_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="7 bytes"):
        tokens_from_bytes(b"1234567")


# Every field of what travels, each with values of its own: one that is new fails here until it has
# some, and until the messages have it.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 128),
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
    "repetition_penalty": st.floats(0, 100, width=32, exclude_min=True),
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
    "request_id": st.text(max_size=9),
    "prompt_token_ids": token_ids,
    "resumed_token_ids": token_ids,
    "sampling": st.builds(SamplingParams, **SAMPLING),
    "cache_salt": st.text(max_size=9),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "tenant": st.text(max_size=9),
}
STAYS = {
    *("client_id", "explain_routing", "shown_token_ids", "hashes", "model"),
    *("arrival_s", "deadline_s", "task", "outputs"),
}


def test_every_field_of_a_request_travels_or_stays_with_the_gateway() -> None:
    assert (
        SAMPLING.keys() == names(SamplingParams) == {*pb.SamplingParams.DESCRIPTOR.fields_by_name}
    )
    assert TRAVELS.keys() | STAYS == names(Prepared)
    of_the_attempt = {"attempt", "token_limit", "probation_tokens"}
    assert TRAVELS.keys() | of_the_attempt == {*group_pb2.Submit.DESCRIPTOR.fields_by_name}


@given(st.fixed_dictionaries(SAMPLING))
def test_sampling_survives_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    data = params_to_proto(params).SerializeToString()
    assert params_from_proto(pb.SamplingParams.FromString(data)) == params


@given(st.fixed_dictionaries(TRAVELS), st.integers(1, 9), st.integers(0, 9))
def test_a_request_survives_the_wire(values: dict[str, Any], attempt: int, probation: int) -> None:
    submit = submit_of(
        Prepared(**values, client_id="c", explain_routing=True),
        attempt=attempt,
        probation_tokens=probation,
    )
    submit = group_pb2.Submit.FromString(submit.SerializeToString())
    assert (submit.attempt, submit.probation_tokens) == (attempt, probation)
    came = prepared_of(submit)
    for name, value in values.items():
        assert_same(getattr(came, name), value)
    assert (came.client_id, came.explain_routing) == ("", False)
    assert prepared_of(submit, request_id="mine").request_id == "mine"


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
            buckets=st.one_of(st.none(), st.binary(max_size=3)),
            digest=st.one_of(
                st.none(), st.integers(0, 255).map(lambda i: Digest(bytes([i]) * 2048))
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
        (group_pb2.EventBatch(snapshot=group_pb2.Snapshot(stored=bytes(33))), "33 bytes"),
        (group_pb2.EventBatch(events=[group_pb2.BlockEvent(removed=bytes(31))]), "31 bytes"),
    ],
)
def test_bytes_that_are_no_hashes_or_digest_are_refused(
    message: group_pb2.EventBatch, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        events_from_proto(message)
