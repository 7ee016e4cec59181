"""LiteLLM: ``use_litellm.py BASE_URL CASE…`` prints the cases' results, as JSON."""

import json
import sys

import litellm
from pydantic import BaseModel

base_url, *cases = sys.argv[1:]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Animal(BaseModel):
    kind: str
    legs: int


def told(case: str) -> str:
    provider, kind = case.split()
    asked = {
        "model": f"{provider}/hash",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "?"}],
        "num_retries": 0,
    }
    if kind == "stream":
        parts = litellm.completion(**asked, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts)
    if kind == "object":
        asked["response_format"] = Animal
    if kind == "tools":
        asked["tools"] = [WEATHER]
        message = litellm.completion(**asked).choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        asked["messages"] += [message.model_dump(), result]
    return litellm.completion(**asked).choices[0].message.content


print(json.dumps([told(case) for case in cases]))
