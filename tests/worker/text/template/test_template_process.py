"""Chat templates are rendered in a separate process, so none can stop or crash the caller."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import demo_model
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.template.process import TemplateLimits, TemplateProcess
from quire.worker.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Grüß Gott 🌍 \x00"}, {"role": "assistant", "content": ""}]
LIMITS = TemplateLimits(timeout_s=20, memory_bytes=256 << 20, max_chars=1_000_000)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"})


@pytest.fixture
def echo() -> Iterator[TemplateProcess]:
    process = TemplateProcess(template("{{ bos_token }}{{ messages[0].content }}"), LIMITS)
    yield process
    process.close()


def test_a_chat_is_rendered_as_here() -> None:
    ours = Tokenizer.load(demo_model.PATH)
    assert ours.template is not None
    process = TemplateProcess(ours.template)
    for add_generation_prompt in (True, False):
        assert process.render(
            CHAT, add_generation_prompt=add_generation_prompt
        ) == ours.render_chat(CHAT, add_generation_prompt=add_generation_prompt)
    process.close()


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{{ 'x'.center(10**7) }}", "makes 10000000 characters of them, at most 1000000"),
        ("{{ 1 // (messages | length - 2) }}", "ZeroDivisionError"),
        ("{{ 'a'.index(messages[0].content) }}", "ValueError"),
        ("{{ '%c' % (10**9) }}", "OverflowError"),
        ("{{ (2.0 ** 99) ** 99 }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[0].a.b }}", "no attribute 'a'"),
        ("{{ raise_exception('x' * 100000) }}", "x…"),
        ("{{ '\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_what_a_template_does_wrong_is_said_and_harms_nothing(source: str, words: str) -> None:
    process = TemplateProcess(template(source), LIMITS)
    for _ in range(2):  # And again, in the same process.
        with pytest.raises(InvalidRequest, match="the chat template refuses these") as raised:
            process.render(CHAT)
        assert words in str(raised.value)
        assert len(str(raised.value)) < 1000
    process.close()


@pytest.mark.parametrize("source", ["{{ 1 // 0 }}", "{{ 'a'.index('b') }}", "{{ (2.0**99)**99 }}"])
def test_an_error_of_a_template_is_a_bad_request_in_this_process_too(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the chat template refuses these messages: .*Error"):
        template(source).render(CHAT, add_generation_prompt=True)


def test_a_template_without_end_is_ended_and_the_next_chat_is_rendered() -> None:
    endless = (
        "{% if messages[0].content == 'spin' %}{% for i in range(99999) %}"
        "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    limits = TemplateLimits(timeout_s=0.5)
    process = TemplateProcess(template(endless), limits)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
        process.render([{"role": "user", "content": "spin"}])
    assert process.render(CHAT[:1]) == CHAT[0]["content"]
    process.close()


def test_a_process_that_died_is_replaced(echo: TemplateProcess) -> None:
    assert echo.render(CHAT).startswith("<s>Grüß")
    assert echo._child._process is not None
    echo._child._process.kill()
    echo._child._process.wait()
    assert echo.render(CHAT).startswith("<s>Grüß")


def test_the_process_goes_with_the_object() -> None:
    mine = TemplateProcess(template("x"))
    mine.render(CHAT)
    assert mine._child._process is not None
    pid = mine._child._process.pid
    del mine
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_process_goes_with_its_owner_however_that_ends() -> None:
    script = (
        "import os, signal\n"
        "from quire.worker.text.template.chat_template import ChatTemplate\n"
        "from quire.worker.text.template.process import TemplateProcess\n"
        "process = TemplateProcess(ChatTemplate('x', special_tokens={}))\n"
        "process.render([{'role': 'user', 'content': ''}])\n"
        "print(process._child._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    child = Path(f"/proc/{int(done.stdout)}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()  # pytest's timeout is the limit.


def test_to_compile_a_template_computes_nothing_of_it() -> None:
    # Constant folding of these on load would take 10 GB, or for ever.
    for source in ("{{ 'x' * 10**10 }}", "{{ 'x' | center(10**10) }}", "{% set x = 9**9**9 %}"):
        template(source)


def test_a_template_that_python_cannot_parse_is_no_template() -> None:
    with pytest.raises(CheckpointError, match="the chat template cannot be read"):
        template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"memory_bytes": 1}, {"max_chars": 0}]
)
def test_limits_that_cannot_work_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TemplateLimits(**wrong)  # type: ignore[arg-type]
