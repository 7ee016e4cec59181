"""The parts of an answer, as events in the order of its text."""

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
    """The call's id if the model writes ids itself; else ""."""


@dataclass(frozen=True)
class CallArguments:
    """A further piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    index: int
    is_whole: bool = True
    """Whether its arguments are a JSON object that fits. If not, the call was cut off or is
    invalid."""


Event = Content | Reasoning | CallBegun | CallArguments | CallEnded
