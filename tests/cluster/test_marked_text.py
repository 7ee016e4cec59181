"""Formats that also mark plain text, and templates that need more than messages."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import pytest
import tokenizers
from tests.allowed import allows
from tests.dialects import calls_of, cuts, parse, required, tool
from tests.marked import walk

from quire.cluster.dialects.dialect import Dialect, choose_dialect
from quire.cluster.dialects.events import Content, Event, Reasoning
from quire.cluster.dialects.grammar import constrain
from quire.worker.request.structured import json_constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.reasoning import REASONING_FORMATS
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.tokenizer import Tokenizer

EACH = "{% for c in m.tool_calls %}{% set f = c.function %}ONE{% endfor %}"
ITEMS = "{% for k, v in f.arguments | items %}ITEM{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def turns(begin: str, text: str, call: str, end: str, *, joined: str = "", last: str = "") -> str:
    """A template for answers, with ``joined`` between two calls and ``last`` after them."""
    calls = EACH.replace("ONE", call + "{% if not loop.last %}" + joined + "{% endif %}")
    said = f"{{% if m.content %}}{text}{{% endif %}}"
    return (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>"
        f"{{% else %}}{begin}{said}{{% if m.tool_calls %}}{calls}{last}{{% endif %}}{end}"
        f"{{% endif %}}{{% endfor %}}{{# tools #}}{{% if add_generation_prompt %}}{begin}"
        "{% endif %}"
    )


def kinds(value: str) -> str:
    return (
        "{% set t = 'string' if v is string else 'boolean' if v is boolean else 'number' "
        "if v is number else 'object' if v is mapping else 'array' %}" + value
    )


FORMATS = {
    "a line that names the recipient": turns(
        "<|model|>~~",
        "text\n{{ m.content }}{% if m.tool_calls %}~~{% endif %}",
        "{{ f.name }}\n{{ f.arguments | tojson }}",
        "<|end|>",
        joined="~~",
    ),
    "a header that names the recipient": turns(
        "<|begin|>model",
        " for=user<|body|>{{ m.content }}{% if m.tool_calls %}<|next|><|begin|>model{% endif %}",
        ' for={{ f.name }}<|body|><do name="{{ f.name }}">\n'
        + ITEMS.replace("ITEM", f'<arg name="{{{{ k }}}}">{VALUE}</arg>\n')
        + "</do>",
        "<|end|>",
        joined="<|next|><|begin|>model",
    ),
    "sections": turns(
        '<|on|>turn of="model"<|it|>',
        "<|on|>say<|it|>{{ m.content }}<|off|>say<|it|>",
        '{% if loop.first %}<|on|>acts<|it|>{% endif %}<|on|>act of="{{ f.name }}" '
        'no="{{ loop.index }}"<|it|>'
        + ITEMS.replace(
            "ITEM",
            kinds(f'<|on|>arg key="{{{{ k }}}}" is="{{{{ t }}}}"<|it|>{VALUE}<|off|>arg<|it|>'),
        )
        + "<|off|>act<|it|>",
        "<|off|>turn<|it|><|end|>",
        last="<|off|>acts<|it|>",
    ),
    "a call behind the end of text": turns(
        "model<|is|>\n",
        "{{ m.content }}",
        f"<|stop|>\n\nact<|is|>\n{OBJECT}",
        "<|stop|>\n\n",
    ),
    "a fence": turns(
        "<|model|>",
        "{{ m.content }}",
        "{% if loop.first %}\nDo:\n```json\n[\n{% endif %}"
        + OBJECT.replace('"arguments"', '"with"'),
        "<|end|>",
        joined=",\n",
        last="\n]```\n",
    ),
    "a variable that the client sends": turns(
        "{{ '' if clock + toolbox else '' }}<|model|>",
        "{{ m.content }}",
        "{% if loop.first %} kit[{% endif %}" + OBJECT,
        "<|end|>",
        joined=", ",
        last="]",
    ),
    "a tag that ends with the turn's": turns(
        "<|model|>",
        "{{ m.content }}",
        "<fn={{ f.name }}>{{ f.arguments | tojson }}</fn>",
        "{{ '<|more|>' if m.tool_calls else '<|end|>' }}",
    ),
}
USE = required(
    [
        tool("weather", {"city": {"type": "string"}, "days": {"type": "array"}}),
        tool("map", {"at": {"type": "object"}, "sure": {"type": "boolean"}}),
    ]
)
CALLS = [
    ("weather", {"city": 'Zürich "old" town', "days": [1, "x"]}),
    ("map", {"at": {"u": 2}, "sure": False}),
]


@cache
def dialect_of(name: str) -> Dialect:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return choose_dialect(Tokenizer(backend, chat_template=FORMATS[name]))


def written(name: str, num_calls: int, text: str | None) -> str:
    """The template's output after the prompt."""
    template = ChatTemplate(FORMATS[name], special_tokens={})
    asked: list[Any] = [{"role": "user", "content": "?"}]
    calls = [
        {"id": f"id{n}", "function": {"name": each, "arguments": json.dumps(arguments)}}
        for n, (each, arguments) in enumerate(CALLS[:num_calls])
    ]
    said = {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
    sent = {"clock": "1", "toolbox": "2"}
    prompt = template.render(asked, template_kwargs=sent)
    shown = template.render([*asked, said], add_generation_prompt=False, template_kwargs=sent)
    assert shown.startswith(prompt)
    return shown.removeprefix(prompt).rstrip("\n").removesuffix("<|end|>")


def read(name: str, pieces: list[str], **options: Any) -> list[Event]:
    return parse(dialect_of(name).calls, pieces, USE.tools, reasoning=None, **options)


def said_in(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", [None, "So > it <is>:\n{1}"])
def test_what_a_template_writes_is_read_in_every_cut(name: str, text: str | None) -> None:
    num = 1 if "behind the end" in name else 2  # That template renders one call only.
    for num_calls in (0, num) if text else (num,):
        answer = written(name, num_calls, text)
        whole = read(name, [answer])
        assert (said_in(whole).strip(), calls_of(whole)) == (text or "", CALLS[:num_calls])
        for pieces in cuts(answer):
            assert read(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_text_has_no_marks_where_a_request_has_no_tools(name: str) -> None:
    answer = written(name, 0, "So?")
    assert said_in(parse(dialect_of(name).calls, [answer], (), reasoning=None)) == "So?"


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_no_tool_is_text(name: str) -> None:
    events = parse(dialect_of(name).calls, [written(name, 1, None)], USE.tools[1:], reasoning=None)
    assert not calls_of(events)
    assert "Zürich" in said_in(events)


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_as_the_template_writes_them(
    name: str, marked: Tokenizer, grammars: Grammars
) -> None:
    constraint = constrain(dialect_of(name), USE, None, reasons=False)
    num = 1 if "behind the end" in name else 2
    answer = written(name, num, None).rstrip()
    answer = answer.removesuffix("<|off|>turn<|it|>").removesuffix("<|stop|>")
    assert any(allows(grammars, marked, constraint, each) for each in (answer, answer.lstrip()))
    text = walk(
        grammars, marked, constraint, random.Random(name), ends=("</arg>", "<|off|>arg<|it|>")
    )
    events = read(name, [text], has_form=True)
    assert not said_in(events).strip()
    schemas = {each.name: each.parameters for each in USE.tools}
    called = calls_of(events)
    assert called
    for each, arguments in called:
        jsonschema.validate(arguments, schemas[each])


@pytest.mark.parametrize("name", FORMATS)
def test_a_form_of_text_is_behind_its_mark(
    name: str, marked: Tokenizer, grammars: Grammars
) -> None:
    form = json_constraint({"type": "object", "properties": {"a": {"const": 1}}})
    use = required([], "none")
    constraint = constrain(dialect_of(name), use, form, reasons=False)
    answer = written(name, 0, '{"a":1}').partition("<|off|>")[0].removesuffix("<|stop|>")
    assert allows(grammars, marked, constraint, answer)
    assert not allows(grammars, marked, constraint, answer.replace("1", "2"))
    assert json.loads(said_in(parse(dialect_of(name).calls, [answer], (), reasoning=None))) == {
        "a": 1
    }


@pytest.mark.parametrize(
    ("form", "thought", "rest"),
    [
        ("kimi_k3", "A plan.<|close|>think<|sep|>", "<|on|>say<|it|>Yes.<|off|>say<|it|>"),
        ("muse", " to=self<|message|>A plan.<|eom|>", "<|begin|>model for=user<|body|>Yes."),
    ],
)
def test_reasoning_is_before_the_marks_of_text(form: str, thought: str, rest: str) -> None:
    reasoning = next(each for each in REASONING_FORMATS if each.name == form)
    name = "sections" if form == "kimi_k3" else "a header that names the recipient"
    for pieces in cuts(thought + rest):
        events = parse(
            dialect_of(name).calls,
            pieces,
            USE.tools,
            reasoning=reasoning,
            is_reasoning=form == "kimi_k3",
        )
        assert events == [Reasoning("A plan."), Content("Yes.")]
