"""How many completions are under way at a gateway, and that they are not too many."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from quire.cluster.errors import Overloaded


class Inflight:
    """``num`` is at most ``limit``, and what ``gauge`` shows."""

    def __init__(self, *, limit: int, gauge: Gauge, refused: Callable[[], object]) -> None:
        """``refused`` is called before each refusal."""
        self.num = 0
        self._limit = limit
        self._gauge = gauge
        self._refused = refused

    @contextmanager
    def entered(self, num_completions: int) -> Iterator[None]:
        """Counts completions as under way. Raises Overloaded: they are too many."""
        if self.num + num_completions > self._limit:
            self._refused()
            raise Overloaded(
                f"{self.num} completions are under way, {num_completions} more exceed the "
                f"gateway's --max-inflight {self._limit}: try again in 1 s",
                reason="inflight",
                retry_after_s=1.0,
            )
        self._change(num_completions)
        try:
            yield
        finally:
            self._change(-num_completions)

    def _change(self, by: int) -> None:
        self.num += by
        self._gauge.set(self.num)
