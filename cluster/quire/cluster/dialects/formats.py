"""The table of formats: how each family of models writes tool calls.

A call is a sequence of parts. The parser reads them and the grammar writes them. A new family is a
new entry here; it needs a new kind of part only if it writes values in a new way. Sources: the chat
templates of the named checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.worker.request.errors import ConfigError
from quire.worker.text.reasoning import HARMONY, REASONING_FORMATS, Frame, ReasoningFormat


@dataclass(frozen=True)
class Literal:
    """A fixed text. Models write the whitespace at its ends as given; the parser accepts more or
    less."""

    text: str
    is_optional: bool = False
    """Whether some answers lack the text."""


@dataclass(frozen=True)
class Spaces:
    """A little whitespace or none, where it is not known what models write."""


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
    """Arguments one by one as name and value: strings as plain text, other values as JSON."""

    key: tuple[str, str]
    """The texts before and after a name; ``value`` has those before and after a value."""
    value: tuple[str, str]
    newline: bool = False
    """Whether a line break stands on either side of a value."""

    attribute: Mapping[str, str] | None = None
    """The text between name and value by the value's JSON type, if it depends on that."""
    gap: str = "\n"
    """Whitespace after the end of a value."""


@dataclass(frozen=True)
class Keywords:
    """Python's keyword arguments, up to the closing parenthesis."""


@dataclass(frozen=True)
class Braces:
    """Arguments in braces: as in JSON, but names have no quotes, and a string is plain text between
    two ``quote``."""

    quote: str


@dataclass(frozen=True)
class Number:
    """The number of the call. Together, name and number are the call's id:
    ``functions.NAME:NUMBER``."""

    is_optional: bool = False


@dataclass(frozen=True)
class Given:
    """The call's id, written by the model. If there is a ``mark``, the id follows it, and both may
    be missing."""

    mark: str = ""


Part = (
    Literal | Spaces | Name | Arguments | CallObject | Fields | Keywords | Braces | Number | Given
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The form of one or more calls."""

    begin: str = ""
    call: tuple[Part, ...]
    between: str | None = None
    """Text between two calls; ``None`` if the shape has exactly one."""
    gap: str = "\n"
    """Whitespace before the marker of another call, if each call has its own."""
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class Around:
    """The marks around text that is not a call, for formats that mark such text."""

    opens: str = ""
    """Mark before text: at the beginning of the answer, and after a marker of calls."""
    closes: tuple[str, ...] = ()
    """Marks after text. One may be the marker of calls, if calls follow the text."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models marks and writes tool calls."""

    name: str
    opens: tuple[str, ...] = ()
    """Markers before calls. Models write the first; the parser accepts all."""
    is_bare: bool = False
    """Whether calls need no marker if the answer consists of nothing else. Such calls must be of
    tools of the request."""
    shapes: tuple[Shape, ...]
    """Forms that may follow the marker. Models write the first; the parser accepts all."""
    closes: tuple[str, ...] = ()
    """Markers that may follow the calls."""
    implied: str = ""
    """The beginning of a call that some models write without the marker."""
    signs: tuple[tuple[str, ...], ...]
    """If a chat template contains all texts of one entry, its model writes this format."""
    id_prefix: str = "call_"
    id_chars: int = 24
    """Number of characters in a call's id, after its prefix."""
    around: Around | None = None
    frame: Frame | None = None
    """If set, the parser reads messages by this frame; the grammar still writes ``shapes``."""


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

# More specific formats come first: templates are tried against them in this order.
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
        id_chars=9,  # The templates refuse other lengths.
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
        closes=("<start_function_response>",),  # Follows the calls unless they end the answer.
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
        closes=("<|tool_response>",),  # As functiongemma's.
        signs=(("<|tool_call>",),),
    ),
    ToolFormat(
        name="pythonic",  # Llama 3.2 and 4, Gemma 3 and 3n if prompted so, ToolACE.
        opens=("<|python_start|>",),
        is_bare=True,
        shapes=(Shape(begin="[", call=(Name(), Literal("("), Keywords()), between=", ", end="]"),),
        closes=("<|python_end|>",),
        signs=(("[func_name1(",),),
    ),
    ToolFormat(
        name="llama3_json",  # Llama 3.1, 3.2, 3.3, 4; Gemma 3 if prompted so.
        opens=("<|python_tag|>", "<|python_start|>"),
        is_bare=True,
        shapes=(Shape(call=(CallObject("parameters"),), between="; "),),
        closes=("<|python_end|>",),
        signs=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
    ),
)


def markers_of(form: ToolFormat | ReasoningFormat | None) -> list[str]:
    """All fixed texts of a format; special tokens may occur in them."""
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
    """Raises ConfigError if a name is neither a format's nor "auto" nor "none"."""
    for setting, name, formats in (
        ("tool_call_parser", tool_call_parser, TOOL_FORMATS),
        ("reasoning_parser", reasoning_parser, REASONING_FORMATS),
    ):
        known = ["auto", "none", *(each.name for each in formats)]
        if name not in known:
            raise ConfigError(f"{setting}={name!r}: must be one of {', '.join(known)}")
