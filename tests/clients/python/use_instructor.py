"""Instructor: ``use_instructor.py BASE_URL MODE…`` prints the objects it received, as JSON."""

import json
import sys
from collections.abc import Iterable
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

base_url, *cases = sys.argv[1:]


class Animal(BaseModel):
    kind: Literal["cat", "hen"]
    legs: int


def found(case: str) -> list[dict[str, object]]:
    mode = instructor.Mode[case.partition(" ")[0]]
    plain = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=mode, model="hash")
    asked = {"messages": [{"role": "user", "content": "?"}], "max_retries": 0}
    if mode is instructor.Mode.PARALLEL_TOOLS:
        animals = list(client.create(response_model=Iterable[Animal], **asked))
    elif case.endswith(" stream"):
        animals = [list(client.create_partial(response_model=Animal, **asked))[-1]]
    else:
        animals = [client.create(response_model=Animal, **asked)]
    return [animal.model_dump() for animal in animals]


print(json.dumps([found(case) for case in cases]))
