"""Error details of refused calls, read with grpcio-status."""

import asyncio
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status

from quire.cluster.edge import grpc_errors
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call.read() if hasattr(call, "read") else call)
    return raised.value


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Error details by type. Their status must equal the call's."""
    status = rpc_status.from_call(error)
    assert status is not None
    found = {}
    for packed in status.details:
        for type_ in (ErrorInfo, BadRequest, RetryInfo):
            if packed.Is(type_.DESCRIPTOR):
                found[type_.__name__] = message = type_()
                packed.Unpack(message)
    assert len(found) == len(status.details)
    assert found["ErrorInfo"].domain == "quire"
    return found


def generate(**fields: Any) -> pb.GenerateRequest:
    prompt = {} if "text" in fields or "chat" in fields else {"token_ids": pb.TokenIds(ids=[5])}
    return pb.GenerateRequest(**{**prompt, **fields})


def sampled(**fields: Any) -> pb.GenerateRequest:
    return generate(sampling=pb.SamplingParams(**fields))


FIELDS = [
    (sampled(temperature=-1), "sampling.temperature"),
    (sampled(stop=["x" * 2000]), "sampling.stop"),
    (sampled(stop_token_ids=[99_999]), "sampling.stop_token_ids"),
    (sampled(logit_bias={1: 1000}), "sampling.logit_bias"),
    (sampled(structured_outputs=pb.Constraint(regex="(")), "sampling.structured_outputs"),
    (sampled(allowed_token_ids=[1] * 2000), "sampling.allowed_token_ids"),
    (generate(text=""), "prompt"),
    (generate(token_ids=pb.TokenIds(ids=[99_999])), "prompt"),
    (generate(cache_salt="x" * 2000), "cache_salt"),
    (generate(chat=pb.Chat(tools_json="{")), "chat.tools_json"),
    (
        generate(chat=pb.Chat(messages=[pb.ChatMessage(fields_json="[]")])),
        "chat.messages.fields_json",
    ),
]


@pytest.mark.slow
async def test_an_invalid_argument_names_its_field(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        for request, field in FIELDS:
            error = await refusal(cluster.inference.Generate(request))
            found = details(error)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert found["ErrorInfo"].reason == "INVALID_REQUEST"
            (violation,) = found["BadRequest"].field_violations
            assert violation.field == field, error.details()
            assert str(error.details()).startswith(violation.description.removesuffix(" …"))
        error = await refusal(
            cluster.inference.Generate(generate(token_ids=pb.TokenIds(ids=[5] * 400)))
        )
        assert details(error)["ErrorInfo"].reason == "CONTEXT_EXCEEDED"


async def test_a_model_that_is_not_there_and_a_long_message(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        for model in ("other", "ü" * 20_000):
            error = await refusal(cluster.inference.Generate(generate(model=model)))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert details(error)["ErrorInfo"].reason == "MODEL_NOT_FOUND"
        error = await refusal(cluster.inference.Generate(sampled(stop=["ü" * 2000, ""])))
        assert "BadRequest" in details(error)


async def test_overload_says_when_to_try_again(start_cluster: Any) -> None:
    async with start_cluster(
        num_groups=1, config={"admission": AdmissionConfig(max_inflight=1)}
    ) as cluster:
        error = await refusal(cluster.inference.Generate(sampled(n=2)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(error)
    assert found["ErrorInfo"].reason == "OVERLOADED"
    seconds = found["RetryInfo"].retry_delay.ToTimedelta().total_seconds()
    metadata = dict(error.trailing_metadata())
    assert seconds == pytest.approx(float(metadata["grpc-retry-pushback-ms"]) / 1000)


async def test_no_group_no_key_and_no_message(start_cluster: Any) -> None:
    async with start_cluster(num_groups=0, group_wait_s=0.05) as cluster:
        error = await refusal(cluster.inference.Generate(generate()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        found = details(error)
        assert found["ErrorInfo"].reason == "UNAVAILABLE"
        assert found["RetryInfo"].retry_delay.seconds == 1
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            tokenize: Any = channel.unary_unary("/quire.v1.Inference/Tokenize")
            error = await refusal(tokenize(b"\xff"))
        assert details(error)["ErrorInfo"].reason == "MALFORMED"
    async with start_cluster(num_groups=1, keys=ApiKeys.of_token("secret")) as cluster:
        error = await refusal(cluster.inference.Generate(generate()))
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert details(error)["ErrorInfo"].reason == "UNAUTHENTICATED"


async def test_an_incident_has_its_number(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        monkeypatch.setattr(cluster.gateway, "prepare", lambda _: 1 / 0)
        error = await refusal(cluster.inference.Generate(generate()))
    info = details(error)["ErrorInfo"]
    assert info.reason == "INTERNAL"
    assert str(error.details()).endswith(info.metadata["incident"])


async def test_a_client_that_leaves_as_it_is_written_to_is_no_incident(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone:
        async def write(self, message: object) -> None:
            # gRPC's core fails a write to a lost connection like this.
            raise grpc.aio.InternalError("Failed execute_batch")

        async def abort(self, *status: object) -> None:
            raise grpc.aio.AbortError

    context = cast(grpc_errors.Context, Gone())
    with pytest.raises(asyncio.CancelledError):
        async with grpc_errors.statuses(context, pb.GenerateRequest()):
            await context.write(pb.GenerateResponse())
    assert caplog.text == ""
