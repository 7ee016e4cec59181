import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.wire import (
    events_from_proto,
    events_to_proto,
    params_from_proto,
    params_to_proto,
    tokens_from_bytes,
    tokens_to_bytes,
)
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.errors import InvalidRequest
from quire.worker.events import BlocksRemoved, BlocksStored, Digest, EventBatch
from quire.worker.hashing import BlockHash, BlockHashes
from quire.worker.sampling_params import SamplingParams

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


def test_every_field_of_sampling_survives_the_wire() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        max_tokens=99,
        min_tokens=4,
        seed=2**63 - 1,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=0,
        presence_penalty=-1.5,
        frequency_penalty=1.25,
        repetition_penalty=1.5,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    message = params_to_proto(params)
    assert len(message.ListFields()) == len(pb.SamplingParams.DESCRIPTOR.fields)
    assert params_from_proto(message) == params


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
