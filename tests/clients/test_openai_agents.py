"""The unmodified OpenAI Agents SDK, over responses and chat completions."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import agents
import pydantic
import pytest
from tests.clients.conftest import CALL, FORM, SERVED

pytestmark = pytest.mark.anyio

APIS = [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel]


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "hen"]
    legs: Literal[2, 4]


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield
    agents.set_tracing_disabled(False)


@asynccontextmanager
async def agent_of(start_cluster: Any, api: Any, **options: Any) -> AsyncIterator[Any]:
    async with start_cluster(**SERVED) as cluster:
        served = api("hash", openai_client=cluster.openai)
        yield agents.Agent(name="a", instructions="the cat", model=served, **options)


async def texts_of(result: Any) -> list[str]:
    return [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
async def test_a_text_and_its_stream(
    start_cluster: Any, converses: Callable[..., None], api: Any
) -> None:
    converses("<think>\nHm.\n</think>\n\nthat is that", "and that")
    async with agent_of(start_cluster, api) as agent:
        answer = await agents.Runner.run(agent, "?")
        streamed = agents.Runner.run_streamed(agent, "?")
        texts = await texts_of(streamed)
        again = await agents.Runner.run(
            agent, [*answer.to_input_list(), {"role": "user", "content": "?"}]
        )
    assert answer.final_output == streamed.final_output == "".join(texts) == "that is that"
    assert again.final_output == "and that"


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_is_called_and_its_result_told(
    start_cluster: Any, converses: Callable[..., None], api: Any, streams: bool
) -> None:
    converses(CALL, "rain")
    cities = []

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather there."""
        cities.append(city)
        return "rain"

    async with agent_of(start_cluster, api, tools=[weather]) as agent:
        result: Any
        if streams:
            result = agents.Runner.run_streamed(agent, "?")
            assert "".join(await texts_of(result)) == "rain"
        else:
            result = await agents.Runner.run(agent, "?")
    assert (result.final_output, cities) == ("rain", ["Ulm"])


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
async def test_structured_output(
    start_cluster: Any, converses: Callable[..., None], api: Any
) -> None:
    converses(FORM)
    async with agent_of(start_cluster, api, output_type=Animal) as agent:
        answer = await agents.Runner.run(agent, "?")
    assert answer.final_output == Animal(kind="cat", legs=4)


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("api", APIS)
async def test_a_tool_beside_structured_output(
    start_cluster: Any, converses: Callable[..., None], api: Any
) -> None:
    converses(CALL, FORM)

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather there."""
        return f"rain in {city}"

    async with agent_of(start_cluster, api, tools=[weather], output_type=Animal) as agent:
        answer = await agents.Runner.run(agent, "?")
    assert [type(item) for item in answer.new_items][:2] == [
        agents.ToolCallItem,
        agents.ToolCallOutputItem,
    ]
    assert answer.final_output == Animal(kind="cat", legs=4)
