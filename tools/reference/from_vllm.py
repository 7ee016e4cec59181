"""Generates the page with Quire's equivalent of each flag of ``vllm serve``."""

import argparse
from pathlib import Path

from tools.reference.markdown import code, table

from quire.cluster.cli.commands import command_line
from quire.worker.request.vllm_names import ALWAYS, REFUSED, SPELLED, VALUES

_FLAGS = Path(__file__).resolve().parents[2] / "tests/cluster/vllm_flags.txt"
_BY_HAND = {
    "--model": "the first argument, `quire serve MODEL`",
    "--revision": "`MODEL@REVISION`",
    "--allowed-origins": "`--allow-origin`, once for each",
}


def page() -> str:
    (commands,) = (
        each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction)
    )
    helps = {
        flag: (each.help or "").replace("%%", "%")
        for each in commands.choices["serve"]._actions
        for flag in each.option_strings
    }
    same, other, always, refused = [], [], [], []
    for flag in sorted(
        _FLAGS.read_text(encoding="ascii").split(), key=lambda each: each.lstrip("-")
    ):
        if flag in _BY_HAND:
            other.append((code(flag), _BY_HAND[flag], ""))
        elif flag in SPELLED:
            other.append((code(flag), code(SPELLED[flag]), helps[SPELLED[flag]]))
        elif flag in ALWAYS:
            always.append((code(flag), ALWAYS[flag]))
        elif flag in REFUSED:
            refused.append((code(flag), REFUSED[flag]))
        else:
            values = ", ".join(f"`{his}` is `{ours}`" for his, ours in VALUES.get(flag, {}).items())
            same.append((code(flag), helps[flag] + (f"; {values}" if values else "")))
    return "".join(
        f"## {title}\n{table(header, rows)}\n"
        for title, header, rows in (
            ("Flags that are the same", ("flag", "meaning"), same),
            ("Flags with another name", ("vLLM's", "Quire's", "meaning"), other),
            ("Flags that change nothing", ("flag", "reason"), always),
            ("Flags that are refused", ("flag", "reason"), refused),
        )
    )
