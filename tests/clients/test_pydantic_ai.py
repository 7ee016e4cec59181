"""Unmodified agents of Pydantic AI, over chat completions and responses."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pydantic
import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tests.clients.conftest import CALL, FORM, SERVED

pytestmark = pytest.mark.anyio

APIS = [OpenAIChatModel, OpenAIResponsesModel]


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "hen"]
    legs: Literal[2, 4]


@asynccontextmanager
async def agent_of(start_cluster: Any, api: Any, **options: Any) -> AsyncIterator[Any]:
    async with start_cluster(**SERVED) as cluster:
        provider = OpenAIProvider(openai_client=cluster.openai)
        yield Agent(api("hash", provider=provider), retries=0, **options)


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
async def test_a_text_and_its_stream(
    start_cluster: Any, converses: Callable[..., None], api: Any
) -> None:
    converses("<think>\nHm.\n</think>\n\nthat is that")
    async with agent_of(start_cluster, api, system_prompt="the cat") as agent:
        answer = await agent.run("?")
        async with agent.run_stream("?") as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
    assert answer.output == "".join(texts) == "that is that"
    assert answer.usage.output_tokens > 1


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_its_result_told(
    start_cluster: Any, converses: Callable[..., None], api: Any, streams: bool
) -> None:
    converses(CALL, "rain")
    cities = []

    def weather(city: str) -> str:
        """The weather there."""
        cities.append(city)
        return "rain"

    async with agent_of(start_cluster, api, tools=[weather]) as agent:
        if streams:
            async with agent.run_stream("?") as stream:
                output = await stream.get_output()
        else:
            output = (await agent.run("?")).output
    assert (output, cities) == ("rain", ["Ulm"])


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput])
async def test_structured_output(
    start_cluster: Any, converses: Callable[..., None], kind: Any, api: Any
) -> None:
    said = CALL.replace('{"city": "Ulm"}', FORM).replace("weather", "final_result")
    converses(said if kind is ToolOutput else FORM)
    async with agent_of(start_cluster, api, output_type=kind(Animal)) as agent:
        answer = await agent.run("?")
    assert answer.output == Animal(kind="cat", legs=4)
