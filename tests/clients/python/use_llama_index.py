"""LlamaIndex: ``use_llama_index.py BASE_URL CASE…`` prints the cases' results, as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

base_url, *cases = sys.argv[1:]


class Animal(BaseModel):
    kind: str
    legs: int


def weather(city: str) -> str:
    """The weather there."""
    return f"rain in {city}"


def told(case: str) -> object:
    model = OpenAILike(
        model="hash",
        api_base=base_url,
        api_key="none",
        max_retries=0,
        is_chat_model=True,
        is_function_calling_model=case != "object",
        should_use_structured_outputs=case == "object",
    )
    asked = [ChatMessage(role="user", content="?")]
    if case == "stream":
        return "".join(part.delta or "" for part in model.stream_chat(asked))
    if case == "complete":
        return model.complete("?").text
    if case == "tools":
        tools = [FunctionTool.from_defaults(weather)]
        return model.predict_and_call(tools, user_msg="?", chat_history=[]).response
    if case == "object":
        return model.structured_predict(Animal, PromptTemplate("?")).model_dump()
    return model.chat(asked).message.content


print(json.dumps([told(case) for case in cases]))
