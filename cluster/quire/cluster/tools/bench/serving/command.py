"""Runs ``quire bench serve``."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import zip_longest
from typing import Any

from quire.cluster.tools.bench.serving.answer import (
    NO_TOKEN,
    Answer,
    Form,
    RequestFailed,
    encode,
    forms,
    probe_of,
)
from quire.cluster.tools.bench.serving.config import ServeBench
from quire.cluster.tools.bench.serving.dataset import Prompt, Vocabulary, arrivals, prompts_of
from quire.cluster.tools.bench.serving.figures import details, figures
from quire.cluster.tools.bench.serving.http import Http
from quire.cluster.tools.bench.serving.load import Load, Progress, Transport, ask, run
from quire.cluster.tools.bench.serving.report import file_name, header, make_folder, table
from quire.worker.request.errors import QuireError

_SHOW_EVERY_S = 0.25
_REFUSALS = ("HTTP 400", "HTTP 422")


def bench_serve(bench: ServeBench) -> int:
    """Runs the benchmark and returns the exit status: 1 if no request was answered.

    Raises:
        QuireError: The server, the dataset or the result folder cannot be used.
    """
    if bench.save_result:
        # Checked before the work that would otherwise be lost.
        make_folder((bench.result_dir / (bench.result_filename or "any")).parent)
    vocabulary = Vocabulary.of(bench.tokenizer) if bench.tokenizer else Vocabulary.guessed()
    prompts = prompts_of(bench.dataset, vocabulary)
    if len(prompts) < bench.dataset.num_prompts:
        _say(f"{bench.dataset.path} has {len(prompts):,} requests: so many are sent")
    model, load = asyncio.run(_measure(bench, prompts))
    now = datetime.now()
    result: dict[str, Any] = {
        **header(bench, model=model, tokenizer=vocabulary.name, num_prompts=len(prompts), now=now),
        **figures(
            load, metrics=bench.metrics, percentiles=bench.percentiles, goodput=bench.goodput
        ),
    }
    print(table(bench, load, result))
    if bench.save_result:
        name = bench.result_filename or file_name(bench, model=model, now=now)
        path = bench.result_dir / name
        whole = result | details(load) if bench.save_detailed else result
        path.write_text(json.dumps(whole) + "\n")
        print(f"\nwritten to {path}")
    return 0 if result["completed"] else 1


async def _measure(bench: ServeBench, prompts: Sequence[Prompt]) -> tuple[str, Load]:
    target, traffic = bench.target, bench.traffic
    shows = bench.shows_progress and sys.stderr.isatty()
    async with Http(target) as http:
        model = target.model or await http.first_model()

        def encoded(prompt: Prompt, form: Form) -> bytes:
            return encode(prompt, form, model=model, is_chat=target.is_chat, more=target.body)

        probe = probe_of(prompts)
        form = await choose_form(
            http, forms(prompts, is_chat=target.is_chat), lambda form: encoded(probe, form)
        )
        _say(
            f"{target.url(target.endpoint)}: {len(prompts):,} requests for {model}, prompts are "
            f"{'token ids' if form.ids else 'text'}"
        )
        bodies = [encoded(prompt, form) for prompt in prompts]
        for number in range(traffic.num_warmups):
            await _asked(http, bodies[number % len(bodies)])
        load = await run(
            bodies,
            arrivals(
                prompts,
                request_rate=traffic.request_rate,
                burstiness=traffic.burstiness,
                seed=bench.dataset.seed,
            ),
            http,
            max_concurrency=traffic.max_concurrency,
            keeps_text=bench.save_detailed,
            clock=time.perf_counter,
            on_progress=_shown() if shows else lambda progress: None,
        )
        if shows:
            sys.stderr.write("\r\x1b[K")
    return model, load


async def choose_form(
    transport: Transport, candidates: Sequence[Form], body: Callable[[Form], bytes]
) -> Form:
    """The first of ``candidates`` whose request, built by ``body``, the server accepts.

    Raises:
        QuireError: The server accepts none, or fails.
    """
    failure = None
    for form, following in zip_longest(candidates, candidates[1:]):
        failure = await _asked(transport, body(form))
        if failure is None or failure.kind == NO_TOKEN:
            return form
        if failure.kind not in _REFUSALS:
            break
        if form.ids and following is not None and not following.ids:
            _say(
                f"no prompts of token ids ({failure}): words take their place, and the server "
                "counts their tokens; --tokenizer says which ids the model has"
            )
    raise QuireError(f"the first request failed, so that no load was sent: {failure}")


async def _asked(transport: Transport, body: bytes) -> RequestFailed | None:
    answer = Answer()
    await ask(body, answer, transport, clock=time.perf_counter)
    return answer.failure


def _shown() -> Callable[[Progress], None]:
    """A progress line in the terminal, rewritten at each update."""
    begin_s = shown_s = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < _SHOW_EVERY_S:
            return
        shown_s = now_s
        sys.stderr.write(
            f"\r\x1b[K{progress.num_done:,} of {progress.num_requests:,} done, "
            f"{progress.num_under_way:,} under way, {progress.num_failed:,} failed, "
            f"{now_s - begin_s:.0f} s"
        )
        sys.stderr.flush()

    return show


def _say(line: str) -> None:
    print(f"quire bench serve: {line}", file=sys.stderr)
