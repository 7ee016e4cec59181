"""What an answer consists of, told in order."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegun:
    index: int
    name: str
    given_id: str = ""
    """The call's id, if the model writes ids itself."""


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    index: int
    is_whole: bool = True
    """Its arguments are a JSON object; else it was cut, or is none."""


Event = Content | Reasoning | CallBegun | CallArguments | CallEnded
