"""The client of OpenAI's completions API: requests streams and records each token's time."""

import json
import time
from typing import Self

import httpx
from bench.serving.load import Stream

_TIMEOUT_S = 300.0


class HttpServer:
    """A `bench.serving.load.Target`: completions over connections of its own, which it keeps."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def send(self, stream: Stream) -> None:
        request = stream.request
        body = {
            "prompt": request.text or list(request.token_ids),
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        stream.sent_s = time.monotonic()
        finish = ""
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    stream.error = f"{answer.status_code}: {(await answer.aread()).decode()}"
                    return
                async for line in answer.aiter_lines():
                    event = line.removeprefix("data: ").strip()
                    if event == "[DONE]":
                        stream.finish = finish
                    elif event:
                        (choice,) = json.loads(event)["choices"]
                        stream.tokens += choice["token_ids"]
                        stream.times += [time.monotonic()] * len(choice["token_ids"])
                        finish = choice["finish_reason"] or ""
            if not stream.finish:
                stream.error = "no [DONE], or no finish reason before it"
        except (httpx.HTTPError, KeyError, ValueError) as failure:
            stream.error = repr(failure)
        finally:
            stream.ended_s = time.monotonic()
