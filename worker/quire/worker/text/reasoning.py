"""The formats in which models mark the reasoning part of an answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.worker.request.errors import UnreadableTemplate
from quire.worker.text.template.response_template import (
    REASONING_FIELDS,
    check_rest,
    fields_of,
    text_of,
)

if TYPE_CHECKING:  # The command line only reads the formats' names, and needs no NumPy.
    from quire.worker.blocks.hashing import TokenIds
    from quire.worker.text.tokenizer import Tokenizer

_TAIL_TOKENS = 8
"""If a template begins the reasoning, it does so within this many last tokens of a prompt."""
_OPENS_TOKENS = 32
"""More tokens than any mark that begins reasoning has, including space after it."""
_MAX_TURN_TOKENS = 32_768
"""How many last tokens of a prompt are searched for the marks of reasoning."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The marks of an answer that is a sequence of messages, each with header, body and end. A
    header names the message's channel and, for a call, its function."""

    start: str
    """The text before the role, at the beginning of a header. The prompt ends with the first one's
    role."""
    channel: str
    kind: str
    """The text before the type of the body."""
    message: str
    """The text between header and body."""
    ends: tuple[str, ...]
    reasoning: str
    """The name of the channel for reasoning."""
    function: str
    """The text before a function's name."""
    answer: str
    """The header of an answer that is not a call."""
    reopens: str
    """The text that begins a message after another one."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """The marks of the reasoning part of an answer, which is at its beginning."""

    name: str
    opens: str
    closes: str
    signs: tuple[tuple[str, ...], ...]
    """If a chat template contains all texts of one entry, its model uses this format."""
    frame: Frame | None = None
    """If set, the parser uses it."""
    opens_token: str = ""
    """The first token of ``opens``, if that is several tokens and this one begins nothing else."""

    def begun(self, tokenizer: "Tokenizer", prompt_token_ids: "TokenIds") -> bool | None:
        """Whether the prompt ends within reasoning (true) or after its end (false); ``None`` if it
        leaves that to the model. The prompt may also have begun the answer's text."""
        token_ids = prompt_token_ids[-_MAX_TURN_TOKENS:].tolist()
        turn = self._last_turn(tokenizer, token_ids)
        shown = token_ids[-_TAIL_TOKENS:] if turn is None else turn
        text = tokenizer.decode(shown, skip_special_tokens=False)
        if turn is None:
            text = text.rstrip()
            return False if text.endswith(self.closes) else text.endswith(self.opens) or None
        opened, closed = text.rfind(self.opens), text.rfind(self.closes)
        return None if opened == closed else opened > closed

    def goes_on(self, tokenizer: "Tokenizer", prompt_token_ids: "TokenIds") -> bool:
        """Whether a prompt that ends within reasoning has some of its text, not only its mark."""
        token_ids = prompt_token_ids[-_OPENS_TOKENS:].tolist()
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return not text.rstrip().endswith(self.opens)

    def _last_turn(self, tokenizer: "Tokenizer", token_ids: list[int]) -> list[int] | None:
        """The tokens after the last special token that is not a mark of reasoning: it ends the
        previous turn or begins this one. ``None`` if there is no such token between turns."""
        marks = self.opens + self.closes
        special = tokenizer.special_tokens
        for at in range(len(token_ids) - 1, 0, -1):  # The first token begins the chat, not a turn.
            text = special.get(token_ids[at])
            if text is not None and text not in marks:
                return token_ids[at + 1 :]
        return None


HARMONY = Frame(
    start="<|start|>",
    channel="<|channel|>",
    kind="<|constrain|>",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning="analysis",
    function="to=functions.",
    answer="<|channel|>final<|message|>",
    reopens="<|start|>assistant",
)

REASONING_FORMATS = (
    ReasoningFormat(
        name="mistral",
        opens="[THINK]",
        closes="[/THINK]",
        signs=(("[THINK]",),),  # Magistral.
    ),
    ReasoningFormat(
        name="seed_oss", opens="<seed:think>", closes="</seed:think>", signs=(("<seed:think>",),)
    ),
    ReasoningFormat(
        name="gemma4",
        opens="<|channel>thought",
        closes="<channel|>",
        signs=(("<|channel>", "<channel|>"),),
        opens_token="<|channel>",
    ),
    ReasoningFormat(
        name="kimi_k3",
        opens="<|open|>think<|sep|>",
        closes="<|close|>think<|sep|>",
        signs=(("'<|open|>' + tag", "'think'"),),
    ),
    ReasoningFormat(
        name="muse",
        opens="to=self<|message|>",
        closes="<|eom|>",
        signs=(("to=self<|message|>", "<|eom|>"),),
    ),
    # DeepSeek R1, Qwen3, QwQ, GLM-4.5.
    ReasoningFormat(name="think", opens="<think>", closes="</think>", signs=(("</think>",),)),
    ReasoningFormat(
        name="harmony",  # gpt-oss.
        opens="<|channel|>analysis<|message|>",
        closes="<|end|>",
        signs=(("<|channel|>", "<|message|>"),),
        frame=HARMONY,
    ),
)


def sign_in(source: str, signs: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first of ``signs`` whose texts all occur in a chat template's source."""
    return next((texts for texts in signs if all(text in source for text in texts)), None)


def reasoning_of(tokenizer: "Tokenizer") -> ReasoningFormat | None:
    """The model's format according to its response template or else its chat template, if any."""
    if tokenizer.response_template is not None:
        try:
            return reasoning_from(tokenizer.response_template)
        except UnreadableTemplate:
            pass
    source = tokenizer.template.text if tokenizer.template is not None else ""
    return next((each for each in REASONING_FORMATS if sign_in(source, each.signs)), None)


def reasoning_from(template: object) -> ReasoningFormat:
    """The format that a response template describes: a known format if it is equal, or a new one.

    Raises:
        UnreadableTemplate: It describes no reasoning at the beginning between two fixed texts.
    """
    fields = fields_of(template)
    field = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if field is None:
        raise UnreadableTemplate("it has no field of reasoning")
    opens, closes = text_of(field.delimiter("open")), text_of(field.delimiter("close"))
    if opens is None or closes is None:
        raise UnreadableTemplate(f"{field.name} is not between two fixed texts")
    marks = (opens, closes)
    known = next((each for each in REASONING_FORMATS if (each.opens, each.closes) == marks), None)
    if known is not None and known.frame is not None:
        return known
    check_rest(fields)
    if field.content != "text" or field.arguments.get("strip", True) is not True:
        raise field.refused("content", (field.content, dict(field.arguments)))
    for key in ("repeats", "transform"):
        if field.given.get(key):
            raise field.refused(key, field.given[key])
    return known or ReasoningFormat(name="response_template", opens=opens, closes=closes, signs=())
