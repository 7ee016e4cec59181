"""LangChain's unmodified ChatOpenAI."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pydantic
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tests.clients.conftest import CALL, FORM, SERVED

pytestmark = pytest.mark.anyio


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "hen"]
    legs: Literal[2, 4]


@tool
def weather(city: str) -> str:
    """The weather there."""
    return f"rain in {city}"


@asynccontextmanager
async def chat_model(start_cluster: Any, **options: Any) -> AsyncIterator[ChatOpenAI]:
    async with start_cluster(**SERVED) as cluster:
        yield ChatOpenAI(
            model="hash",
            base_url=f"{cluster.http_url}/v1",
            api_key=pydantic.SecretStr("none"),
            max_retries=0,
            **options,
        )


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_a_chat_and_its_stream(
    start_cluster: Any, converses: Callable[..., None], use_responses_api: bool
) -> None:
    converses("that is that")
    async with chat_model(start_cluster, use_responses_api=use_responses_api) as llm:
        answer = await llm.ainvoke("?")
        chunks = [chunk async for chunk in llm.astream("?")]
        several = await llm.abatch(["?", "the cat"])
    assert [answer.text, *(each.text for each in several)] == ["that is that"] * 3
    assert "".join(chunk.text for chunk in chunks) == "that is that"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 1


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("use_responses_api", [False, True])
async def test_a_tool_is_called_and_its_result_told(
    start_cluster: Any, converses: Callable[..., None], use_responses_api: bool
) -> None:
    converses(CALL, "rain")
    async with chat_model(start_cluster, use_responses_api=use_responses_api) as llm:
        bound = llm.bind_tools([weather])
        asked = HumanMessage("?")
        answer = await bound.ainvoke([asked])
        (call,) = answer.tool_calls
        streamed: Any = None
        async for chunk in bound.astream([asked]):
            streamed = chunk if streamed is None else streamed + chunk
        result = await weather.ainvoke(call)
        final = await bound.ainvoke([asked, answer, result])
        required = llm.bind_tools([weather], tool_choice="weather")
        (named,) = (await required.ainvoke([asked])).tool_calls
    assert isinstance(result, ToolMessage)
    assert (call["name"], call["args"]) == ("weather", {"city": "Ulm"})
    assert result.content == "rain in Ulm"
    assert streamed.tool_calls[0]["args"] == named["args"] == {"city": "Ulm"}
    assert final.text == "rain"


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_structured_output(
    start_cluster: Any, converses: Callable[..., None], method: Any
) -> None:
    said = CALL.replace('{"city": "Ulm"}', FORM).replace("weather", "Animal")
    converses(said if method == "function_calling" else FORM)
    async with chat_model(start_cluster) as llm:
        answer = await llm.with_structured_output(Animal, method=method).ainvoke("?")
    assert answer == Animal(kind="cat", legs=4)
