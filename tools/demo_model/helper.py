"""A second process that computes gradients on weights it shares with the trainer.

The trainer and its helper never wait for each other. On a machine whose cores are busy with
other work this keeps every idle moment in use, where two threads in step would stall on the
slower one. The price is that a gradient may be one update old when it is applied.
"""

from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized

import torch
import torch.multiprocessing as mp
from torch import nn

ComputeGradient = Callable[[nn.Module, float], float]
"""Adds the gradient of one batch to the parameters, given the share of the budget that has
passed, and returns the mean loss."""
MakeCompute = Callable[[int], tuple[nn.Module, ComputeGradient]]
"""Builds a model and a gradient function from a seed; it runs in the helper's process."""


class Helper:
    """The helper's process and what it shares with the trainer."""

    def __init__(self, make: MakeCompute, seed: int, model: nn.Module) -> None:
        model.share_memory()
        self._gradients = [torch.zeros_like(p) for p in model.parameters()]
        for gradient in self._gradients:
            gradient.share_memory_()  # type: ignore[no-untyped-call]
        context = mp.get_context("spawn")
        self._lock = context.Lock()
        self._num_batches = context.Value("i", 0)
        self._done = context.Value("d", 0.0)
        weights = [p.detach() for p in model.parameters()]
        arguments = (make, seed, weights, self._gradients, self._lock, self._num_batches)
        self._process = context.Process(target=_run, args=(*arguments, self._done), daemon=True)
        self._process.start()

    def collect(self, model: nn.Module, done: float) -> int:
        """Average the helper's gradients into the model's; return how many batches it did."""
        self._done.value = done
        with self._lock:
            num_batches = int(self._num_batches.value)
            self._num_batches.value = 0
            for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(gradient).div_(1 + num_batches)
                gradient.zero_()
        return num_batches

    def stop(self) -> None:
        """End the helper's process."""
        self._process.terminate()
        self._process.join()


def _run(
    make: MakeCompute,
    seed: int,
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    lock: "mp.synchronize.Lock",  # type: ignore[name-defined]
    num_batches: "Synchronized[int]",
    done: "Synchronized[float]",
) -> None:
    torch.set_num_threads(1)
    model, compute = make(seed)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data = weight  # From now on the trainer's updates are seen here.
    trainer = mp.parent_process()
    assert trainer is not None
    while trainer.is_alive():  # A killed trainer cannot stop its helper.
        compute(model, done.value)
        with lock:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                gradient.add_(parameter.grad)
                parameter.grad = None
            num_batches.value += 1
