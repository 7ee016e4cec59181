"""How models mark the part of an answer that is reasoning."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.worker.api.errors import UnreadableTemplate
from quire.worker.text.response_template import REASONING_FIELDS, check_rest, fields_of, text_of

if TYPE_CHECKING:  # The command line reads the names of formats, and needs no NumPy for that.
    from quire.worker.api.hashing import TokenIds
    from quire.worker.text.tokenizer import Tokenizer

_TAIL_TOKENS = 8
"""Last tokens of a prompt, among which a template that begins the reasoning does so."""
_OPENS_TOKENS = 32
"""More than a mark has that begins reasoning, with space behind it."""
_MAX_TURN_TOKENS = 32_768
"""How many of the last tokens of a prompt are searched for the marks of reasoning."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """An answer is a sequence of messages: header, body and end. A header names the message's
    channel and, of a call, its function."""

    start: str
    """Before the role, with which a header begins; the prompt ends with that of the first."""
    channel: str
    kind: str
    """Before the type of the body."""
    message: str
    """Between header and body."""
    ends: tuple[str, ...]
    reasoning: str
    """The channel of reasoning."""
    function: str
    """Before a function's name."""
    answer: str
    """The header of an answer that is no call."""
    reopens: str
    """What begins a message behind another."""


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How the part of an answer that is reasoning is marked; it is at the beginning."""

    name: str
    opens: str
    closes: str
    signs: tuple[tuple[str, ...], ...]
    """A chat template that contains all texts of one entry belongs to models that write this."""
    frame: Frame | None = None
    """Where there is one, the parser reads by it."""
    opens_token: str = ""
    """The first token of ``opens``, where it is several and this one begins nothing else."""

    def begun(self, tokenizer: "Tokenizer", prompt_token_ids: "TokenIds") -> bool | None:
        """Whether the prompt ends within reasoning, or behind its end; ``None`` where it leaves
        that to the model. The prompt may have begun the answer's text, too."""
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
        """Whether a prompt that ends within reasoning has a text of it, and not only its mark."""
        token_ids = prompt_token_ids[-_OPENS_TOKENS:].tolist()
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return not text.rstrip().endswith(self.opens)

    def _last_turn(self, tokenizer: "Tokenizer", token_ids: list[int]) -> list[int] | None:
        """What is behind the last special token that is no mark of reasoning: it ends the turn
        before, or begins this one. ``None`` without such a token between turns."""
        marks = self.opens + self.closes
        special = tokenizer.special_tokens
        for at in range(len(token_ids) - 1, 0, -1):  # The first one of a prompt begins the chat.
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
    """The first of ``signs`` all of whose texts are in a chat template."""
    return next((texts for texts in signs if all(text in source for text in texts)), None)


def reasoning_of(tokenizer: "Tokenizer") -> ReasoningFormat | None:
    """What the response template says or else the chat template shows, if any."""
    if tokenizer.response_template is not None:
        try:
            return reasoning_from(tokenizer.response_template)
        except UnreadableTemplate:
            pass
    source = tokenizer.template.text if tokenizer.template is not None else ""
    return next((each for each in REASONING_FORMATS if sign_in(source, each.signs)), None)


def reasoning_from(template: object) -> ReasoningFormat:
    """What a response template says: the format above that is the same, or one of its own.

    Raises:
        UnreadableTemplate: It has no reasoning, or none that is at the beginning and between two
            fixed texts.
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
