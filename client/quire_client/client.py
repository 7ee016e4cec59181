"""The synchronous and the asyncio client, which have the same methods.

Every call raises a subclass of `QuireError` by the cause of the failure. ``timeout_s`` is the
call's deadline, which is sent to the server: it refuses a request at once that would wait longer.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self

import grpc
import grpc.aio

from quire_client import inference_pb2 as pb
from quire_client.errors import InvalidArgument, error_of
from quire_client.inputs import (
    Chat,
    Prompt,
    SamplingParams,
    detokenize_request,
    embed_request,
    generate_request,
    rank_request,
    tokenize_request,
)
from quire_client.outputs import (
    Chunk,
    Completion,
    Embedding,
    Ranked,
    TokenLogprobs,
    chunk_of,
    completions_of,
    embeddings_of,
    ranked_of,
)

_OPTIONS = [
    # The scores of all tokens of a prompt are sent in one message.
    ("grpc.max_receive_message_length", 256 * 2**20),
    # Keepalive pings detect a server that vanished. Servers allow one ping per 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]

_Metadata = tuple[tuple[str, str], ...]


class _Calls:
    """The service's methods on a synchronous or asyncio channel."""

    def __init__(self, channel: Any, *, api_key: str | None) -> None:
        service = pb.DESCRIPTOR.services_by_name["Inference"]
        calls = {
            method.name: (channel.unary_stream if method.server_streaming else channel.unary_unary)(
                f"/{service.full_name}/{method.name}",
                request_serializer=getattr(pb, method.input_type.name).SerializeToString,
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
            for method in service.methods
        }
        self.generate: Any = calls["Generate"]
        self.embed: Any = calls["Embed"]
        self.rank: Any = calls["Rank"]
        self.tokenize: Any = calls["Tokenize"]
        self.detokenize: Any = calls["Detokenize"]
        self._key = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    def metadata(self, request_id: str = "") -> _Metadata:
        return (*self._key, ("x-request-id", request_id)) if request_id else self._key


class Client:
    """A thread-safe connection to the gRPC server at ``address`` (``host:port``).

    ``tls`` verifies the server by the well-known certificate authorities; ``root_certificates``
    (PEM) replace them and imply ``tls``. ``options`` are gRPC channel options.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        _check_key(api_key)
        if tls or root_certificates is not None:
            credentials = grpc.ssl_channel_credentials(root_certificates)
            self._channel = grpc.secure_channel(address, credentials, [*_OPTIONS, *options])
        else:
            self._channel = grpc.insecure_channel(address, [*_OPTIONS, *options])
        self._calls = _Calls(self._channel, api_key=api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call."""
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        priority: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yields chunks of all completions as they arrive. Closing it cancels the request.

        ``model`` may be empty if the server has one model. Cached prefixes are shared only between
        requests with the same ``cache_salt``. Requests with a lower ``priority`` run first.
        """
        request = generate_request(
            prompt, params, model=model, cache_salt=cache_salt, priority=priority
        )
        call = self._calls.generate(
            request, timeout=timeout_s, metadata=self._calls.metadata(request_id)
        )
        try:
            for response in call:
                yield chunk_of(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        priority: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """The ``params.n`` whole completions; the other arguments are those of `stream`."""
        return completions_of(
            self.stream(
                prompt,
                params,
                model=model,
                cache_salt=cache_salt,
                priority=priority,
                request_id=request_id,
                timeout_s=timeout_s,
            )
        )

    def score(
        self,
        prompt: Prompt,
        *,
        num_top: int = 0,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[TokenLogprobs, ...]:
        """The scores of the prompt's tokens except the first, each with ``num_top`` likeliest."""
        (completion,) = self.generate(
            prompt,
            _scoring(num_top),
            model=model,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return completion.start.prompt_logprobs

    def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int = 0,
        truncate_prompt_tokens: int | None = None,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[Embedding]:
        """The embedding vectors of ``inputs``, which are texts or lists of token ids, in order.

        ``dimensions`` keeps only the first numbers of each vector; 0 keeps all.
        ``truncate_prompt_tokens`` limits the tokens of an input, -1 to what the model accepts; if
        it is ``None``, a longer input is refused.
        """
        request = embed_request(
            inputs,
            model=model,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
        )
        return embeddings_of(self._ask(self._calls.embed, request, timeout_s))

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        truncate_prompt_tokens: int | None = None,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """Ranks ``documents`` by similarity to ``query``, best first; only the best ``top_n``
        unless that is 0. The other arguments are those of `embed`."""
        request = rank_request(
            query,
            documents,
            model=model,
            top_n=top_n,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
        )
        return ranked_of(self._ask(self._calls.rank, request, timeout_s))

    def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[int]:
        """The prompt's token ids. ``add_special_tokens``: include those around a text, such as BOS;
        a chat template has its own."""
        request = tokenize_request(prompt, model=model, add_special_tokens=add_special_tokens)
        return list(self._ask(self._calls.tokenize, request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(
            token_ids, model=model, skip_special_tokens=skip_special_tokens
        )
        return str(self._ask(self._calls.detokenize, request, timeout_s).text)

    def _ask(self, call: Any, request: object, timeout_s: float | None) -> Any:
        try:
            return call(request, timeout=timeout_s, metadata=self._calls.metadata())
        except grpc.RpcError as error:
            raise error_of(error) from error


class AsyncClient:
    """`Client` for asyncio. It belongs to the event loop in which it was created."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        _check_key(api_key)
        if tls or root_certificates is not None:
            credentials = grpc.ssl_channel_credentials(root_certificates)
            self._channel = grpc.aio.secure_channel(
                address, credentials, options=[*_OPTIONS, *options]
            )
        else:
            self._channel = grpc.aio.insecure_channel(address, options=[*_OPTIONS, *options])
        self._calls = _Calls(self._channel, api_key=api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call."""
        await self._channel.close()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        priority: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """As `Client.stream`. Cancelling the reading task, or closing it, cancels the request."""
        request = generate_request(
            prompt, params, model=model, cache_salt=cache_salt, priority=priority
        )
        call = self._calls.generate(
            request, timeout=timeout_s, metadata=self._calls.metadata(request_id)
        )
        try:
            async for response in call:
                yield chunk_of(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        priority: int = 0,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """As `Client.generate`."""
        chunks = self.stream(
            prompt,
            params,
            model=model,
            cache_salt=cache_salt,
            priority=priority,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        return completions_of([chunk async for chunk in chunks])

    async def score(
        self,
        prompt: Prompt,
        *,
        num_top: int = 0,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[TokenLogprobs, ...]:
        """As `Client.score`."""
        (completion,) = await self.generate(
            prompt,
            _scoring(num_top),
            model=model,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        )
        return completion.start.prompt_logprobs

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        dimensions: int = 0,
        truncate_prompt_tokens: int | None = None,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[Embedding]:
        """As `Client.embed`."""
        request = embed_request(
            inputs,
            model=model,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
        )
        return embeddings_of(await self._ask(self._calls.embed, request, timeout_s))

    async def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        truncate_prompt_tokens: int | None = None,
        model: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> list[Ranked]:
        """As `Client.rank`."""
        request = rank_request(
            query,
            documents,
            model=model,
            top_n=top_n,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
        )
        return ranked_of(await self._ask(self._calls.rank, request, timeout_s))

    async def tokenize(
        self,
        prompt: str | Chat,
        *,
        add_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[int]:
        """As `Client.tokenize`."""
        request = tokenize_request(prompt, model=model, add_special_tokens=add_special_tokens)
        return list((await self._ask(self._calls.tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """As `Client.detokenize`."""
        request = detokenize_request(
            token_ids, model=model, skip_special_tokens=skip_special_tokens
        )
        return str((await self._ask(self._calls.detokenize, request, timeout_s)).text)

    async def _ask(self, call: Any, request: object, timeout_s: float | None) -> Any:
        try:
            return await call(request, timeout=timeout_s, metadata=self._calls.metadata())
        except grpc.RpcError as error:
            raise error_of(error) from error


def _scoring(num_top: int) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=num_top)


def _check_key(api_key: str | None) -> None:
    """Raises InvalidArgument for an invalid key, without any part of the key in the message."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument(
            "api_key: has characters that cannot be sent; is it one line?",
            code=grpc.StatusCode.INVALID_ARGUMENT,
        )
