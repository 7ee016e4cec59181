"""The table: how each family of models writes its calls of tools.

A call is a sequence of parts, which the parser reads and the grammar writes. A new family is an
entry here, or a new part where it writes values as none did before. Sources: the chat templates of
the checkpoints named.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.worker.api.errors import ConfigError
from quire.worker.text.reasoning import HARMONY, REASONING_FORMATS, Frame, ReasoningFormat


@dataclass(frozen=True)
class Literal:
    """This text. Whitespace at its ends is what models write; more or less of it is read too."""

    text: str
    is_optional: bool = False
    """Some answers lack it."""


@dataclass(frozen=True)
class Spaces:
    """Whitespace where it is not known which models write: a little of it, or none."""


@dataclass(frozen=True)
class Name:
    """The name of the function."""


@dataclass(frozen=True)
class Arguments:
    """The arguments, a JSON value."""


@dataclass(frozen=True)
class CallObject:
    """A JSON object with name and arguments, under these keys."""

    arguments: str
    name: str = "name"


@dataclass(frozen=True)
class Fields:
    """Arguments one by one as name and value: text as it is, other values as JSON."""

    key: tuple[str, str]
    """The texts around a name, as below those around a value."""
    value: tuple[str, str]
    newline: bool = False
    """A line break stands on either side of a value."""

    attribute: Mapping[str, str] | None = None
    """What stands between name and value, by the JSON type of the value, where that differs."""
    gap: str = "\n"
    """Whitespace behind a value's end."""


@dataclass(frozen=True)
class Keywords:
    """Python's keyword arguments, up to the closing parenthesis."""


@dataclass(frozen=True)
class Braces:
    """Arguments in braces: as in JSON, but with plain names, and a text as it is between two
    ``quote``."""

    quote: str


@dataclass(frozen=True)
class Number:
    """The number of the call. With the name, it is the call's id: ``functions.NAME:NUMBER``."""

    is_optional: bool = False


@dataclass(frozen=True)
class Given:
    """The call's id, which the model gives: behind ``mark``, if that comes, where there is one."""

    mark: str = ""


Part = (
    Literal | Spaces | Name | Arguments | CallObject | Fields | Keywords | Braces | Number | Given
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One or more calls."""

    begin: str = ""
    call: tuple[Part, ...]
    between: str | None = None
    """What is between two calls; ``None`` where there is always one."""
    gap: str = "\n"
    """What is before the marker of another call, where each has its own."""
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class Around:
    """The marks of text that is no call, where an answer's text has some."""

    opens: str = ""
    """Before text: where the answer begins, and behind a marker of calls."""
    closes: tuple[str, ...] = ()
    """Behind text. One may be the marker of calls, if they follow it."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How calls are marked and written."""

    name: str
    opens: tuple[str, ...] = ()
    """Markers before calls; the first is what models write."""
    is_bare: bool = False
    """Calls need no marker where they are all that the model says; then they must be of tools that
    the request has."""
    shapes: tuple[Shape, ...]
    """What may follow; the first is what models write."""
    closes: tuple[str, ...] = ()
    """Markers that may follow the calls."""
    implied: str = ""
    """The beginning of a call that some models write without the marker before it."""
    signs: tuple[tuple[str, ...], ...]
    """A chat template that contains all texts of one entry belongs to models that write this."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """The length of a call's id, behind its prefix."""
    around: Around | None = None
    frame: Frame | None = None
    """If there is a frame, the parser reads by it; the grammar still writes ``shapes``."""


_MISTRAL_LIST = Shape(begin=" [", call=(CallObject("arguments"),), between=", ", end="]")
_MISTRAL_ARGS = Shape(
    call=(Name(), Given("[CALL_ID]"), Literal("[ARGS]", is_optional=True), Arguments()),
    between="[TOOL_CALLS]",
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)

_BRACED_NAME = (Literal("call", is_optional=True), Literal(":", is_optional=True), Name())

# The more particular formats first: each is tried for a template in this order.
TOOL_FORMATS = (
    ToolFormat(
        name="deepseek_v3",  # DeepSeek-V3, -V3-0324, -R1.
        opens=(_DEEPSEEK[0],),
        shapes=(
            Shape(
                call=(
                    Literal(f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}"),
                    Name(),
                    Literal("\n```json\n"),
                    Arguments(),
                    Literal(f"\n```{_DEEPSEEK[3]}"),
                ),
                between="\n",
                end="<｜tool▁calls▁end｜>",
            ),
        ),
        implied=_DEEPSEEK[1],
        signs=((_DEEPSEEK[0], "```json"),),
    ),
    ToolFormat(
        name="deepseek_v31",  # DeepSeek-V3.1.
        opens=(_DEEPSEEK[0],),
        shapes=(
            Shape(
                call=(
                    Literal(_DEEPSEEK[1]),
                    Name(),
                    Literal(_DEEPSEEK[2]),
                    Arguments(),
                    Literal(_DEEPSEEK[3]),
                ),
                between="",
                end="<｜tool▁calls▁end｜>",
            ),
        ),
        implied=_DEEPSEEK[1],
        signs=((_DEEPSEEK[0],),),
    ),
    ToolFormat(
        name="mistral_v11",  # Mistral Small 3.2, Magistral, Devstral.
        opens=("[TOOL_CALLS]",),
        shapes=(_MISTRAL_ARGS, _MISTRAL_LIST),
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        id_prefix="",
        id_chars=9,  # Their templates refuse others.
    ),
    ToolFormat(
        name="mistral",  # Mistral 7B v0.3, Nemo, Small 3.1.
        opens=("[TOOL_CALLS]",),
        shapes=(_MISTRAL_LIST, _MISTRAL_ARGS),
        signs=(("[TOOL_CALLS]",),),
        id_prefix="",
        id_chars=9,
    ),
    ToolFormat(
        name="glm45",  # GLM-4.5, -4.6.
        opens=("<tool_call>",),
        shapes=(
            Shape(
                call=(
                    Name(),
                    Literal("\n"),
                    Fields(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
                ),
                end="</tool_call>",
            ),
        ),
        signs=(("<arg_key>",),),
    ),
    ToolFormat(
        name="qwen3_coder",
        opens=("<tool_call>",),
        shapes=(
            Shape(
                begin="\n",
                call=(
                    Literal("<function="),
                    Name(),
                    Literal(">\n"),
                    Fields(("<parameter=", ">"), ("", "</parameter>"), newline=True),
                    Literal("</function>\n"),
                ),
                end="</tool_call>",
            ),
        ),
        implied="<function=",
        signs=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        name="kimi_k2",
        opens=("<|tool_calls_section_begin|>",),
        shapes=(
            Shape(
                call=(
                    Literal("<|tool_call_begin|>"),
                    Literal("functions.", is_optional=True),
                    Name(),
                    Literal(":", is_optional=True),
                    Number(is_optional=True),
                    Literal("<|tool_call_argument_begin|>"),
                    Arguments(),
                    Literal("<|tool_call_end|>"),
                ),
                between="",
                end="<|tool_calls_section_end|>",
            ),
        ),
        implied="<|tool_call_begin|>",
        signs=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        name="harmony",  # gpt-oss.
        opens=(f"<|channel|>commentary {HARMONY.function}",),
        shapes=(
            Shape(
                call=(Name(), Literal(" <|constrain|>json<|message|>"), Arguments()),
                between=f"<|call|><|start|>assistant<|channel|>commentary {HARMONY.function}",
            ),
        ),
        signs=(("<|channel|>", "<|message|>"),),
        frame=HARMONY,
    ),
    ToolFormat(
        name="granite",  # Granite 3, Phi-4-mini.
        opens=("<|tool_call|>", "<tool_call>"),
        shapes=(Shape(begin="[", call=(CallObject("arguments"),), between=", ", end="]"),),
        closes=("<|/tool_call|>",),
        signs=(("<|tool_call|>",),),
    ),
    ToolFormat(
        name="hermes",  # Hermes 2 and 3, Qwen2.5, Qwen3.
        opens=("<tool_call>",),
        shapes=(
            Shape(begin="\n", call=(CallObject("arguments"),), end="\n</tool_call>"),
            Shape(begin="[", call=(CallObject("arguments"),), between=",", end="]"),
            Shape(begin="```json", call=(CallObject("arguments"),), between="", end="```"),
        ),
        closes=("</tool_call>",),
        signs=(("<tool_call>",),),
    ),
    ToolFormat(
        name="functiongemma",
        opens=("<start_function_call>",),
        shapes=(
            Shape(
                call=(*_BRACED_NAME, Braces("<escape>")),
                end="<end_function_call>",
                gap="",
            ),
        ),
        closes=("<start_function_response>",),  # It comes next, unless it ends the answer.
        signs=(("<start_function_call>",),),
    ),
    ToolFormat(
        name="gemma4",  # Gemma 4, DiffusionGemma.
        opens=("<|tool_call>",),
        shapes=(
            Shape(
                call=(*_BRACED_NAME, Braces('<|"|>')),
                end="<tool_call|>",
                gap="",
            ),
        ),
        closes=("<|tool_response>",),  # As that of functiongemma.
        signs=(("<|tool_call>",),),
    ),
    ToolFormat(
        name="pythonic",  # Llama 3.2 and 4, Gemma 3 and 3n where prompted so, ToolACE.
        opens=("<|python_start|>",),
        is_bare=True,
        shapes=(Shape(begin="[", call=(Name(), Literal("("), Keywords()), between=", ", end="]"),),
        closes=("<|python_end|>",),
        signs=(("[func_name1(",),),
    ),
    ToolFormat(
        name="llama3_json",  # Llama 3.1, 3.2, 3.3, 4; Gemma 3 where prompted so.
        opens=("<|python_tag|>", "<|python_start|>"),
        is_bare=True,
        shapes=(Shape(call=(CallObject("parameters"),), between="; "),),
        closes=("<|python_end|>",),
        signs=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
    ),
)


def markers_of(form: ToolFormat | ReasoningFormat | None) -> list[str]:
    """All fixed texts of a format, in which special tokens may be."""
    if form is None:
        return []
    frame = form.frame
    framing = [frame.start, frame.answer, frame.kind, *frame.ends] if frame else []
    if isinstance(form, ReasoningFormat):
        return [form.opens, form.closes, *framing]
    texts = [*framing, *form.opens, *form.closes]
    if form.around is not None:
        texts += [form.around.opens, *form.around.closes]
    for shape in form.shapes:
        texts += [shape.begin, shape.between or "", shape.end]
        for part in shape.call:
            if isinstance(part, Literal):
                texts.append(part.text)
            elif isinstance(part, Given):
                texts.append(part.mark)
            elif isinstance(part, Fields):
                texts += [*part.key, *part.value]
            elif isinstance(part, Braces):
                texts.append(part.quote)
    return [text for text in texts if text]


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError: one is neither a format nor "auto" nor "none"."""
    for setting, name, formats in (
        ("tool_call_parser", tool_call_parser, TOOL_FORMATS),
        ("reasoning_parser", reasoning_parser, REASONING_FORMATS),
    ):
        known = ["auto", "none", *(each.name for each in formats)]
        if name not in known:
            raise ConfigError(f"{setting}={name!r}: must be one of {', '.join(known)}")
