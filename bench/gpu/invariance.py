"""Checks batch invariance: whether a row's bits depend on its batch, in products and in a model."""

import torch
from bench.gpu.lines import Lines
from bench.gpu.model import decode_step, engine_rank, prompt_step, ways
from bench.gpu.shapes import linear_shapes
from bench.gpu.timings import Timer
from torch import Tensor

from quire.kernels.backend import backend_for
from quire.worker.rank.runner import ModelRunner
from quire.worker.step.messages import StepInput

ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64, 100, 128, 200, 256, 512, 1024, 2048)
REPEATS = 100


def check_products(timer: Timer) -> None:
    """The first row of each linear layer's product, at each number of rows, against alone."""
    scale, lines = timer.scale, timer.lines
    backend = backend_for(scale.device)
    most = 8 if scale.is_dry else ROWS[-1]
    for name, outputs, inputs in linear_shapes(scale):
        if not lines.begin(f"product {name}"):
            continue
        weight = torch.randn(outputs, inputs, device=scale.device).to(scale.dtype) * 0.02
        layer = backend.pack_linear(weight)
        x = torch.randn(most, inputs, device=scale.device).to(scale.dtype)
        alone = layer(x[:1])
        differ = [
            rows for rows in ROWS if rows <= most and not torch.equal(layer(x[:rows])[:1], alone)
        ]
        lines.fact(f"rows at which {name}'s first row differs from alone", differ or "none")


def check_model(timer: Timer) -> None:
    """A row's logits alone, in batches, by graph and call by call; a prompt whole and in chunks."""
    scale, lines = timer.scale, timer.lines
    with engine_rank(scale) as (executor, _):
        runner = executor._runner
        assert runner is not None
        vocab_size = int(scale.llama["vocab_size"])
        context = scale.decodes[0][1]
        alone = None
        sizes = sorted({rows for rows, length in scale.decodes if length == context})
        for way in ways(runner):
            for rows in sizes:
                if not lines.begin(f"decode {rows}, {way}"):
                    continue
                row = _first_row(runner, decode_step(rows, context, vocab_size))
                alone = row if alone is None else alone
                _say(lines, f"decode logits of a row in {rows}, {way}, against alone", row, alone)
        if lines.begin("repeats"):
            step = decode_step(sizes[-1], context, vocab_size)
            first = _first_row(runner, step)
            repeats = 3 if scale.is_dry else REPEATS
            same = sum(bool(torch.equal(_first_row(runner, step), first)) for _ in range(repeats))
            lines.fact(f"repeats of one step with the same bits, of {repeats}", same)
        if lines.begin("chunks"):
            length = 24 if scale.is_dry else 2048
            whole = _first_row(runner, prompt_step(0, length, vocab_size))
            cut = length // 3
            _first_row(runner, prompt_step(0, cut, vocab_size))
            chunked = _first_row(runner, prompt_step(cut, length - cut, vocab_size))
            what = f"logits of a prompt of {length} in two chunks, against whole"
            _say(lines, what, chunked, whole)


def _first_row(runner: ModelRunner, step: StepInput) -> Tensor:
    logits = runner.forward(step)
    assert logits is not None
    return logits[:1].clone()


def _say(lines: Lines, what: str, got: Tensor, want: Tensor) -> None:
    if torch.equal(got, want):
        lines.fact(what, "same bits")
        return
    distance = float((got.double() - want.double()).abs().max())
    lines.fact(what, f"differs by {distance:.3g}, scale {float(want.abs().max()):.3g}")
