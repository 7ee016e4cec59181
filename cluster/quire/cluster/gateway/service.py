"""Serves one model at a gateway: prepares each request once, and runs it.

The module knows neither HTTP nor gRPC; both find the service in the gateway's `Models`. It imports
no torch: the tokens come from the groups.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from quire.cluster.gateway.admit import Admit
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.pipeline import Pipeline
from quire.cluster.gateway.prepare import Abilities, Preparer
from quire.cluster.gateway.work import Parts, Take, Work
from quire.cluster.links.groups import Groups
from quire.cluster.serving.bounds import Inflight
from quire.cluster.serving.queue import AdmissionQueue
from quire.cluster.telemetry.metrics import Telemetry
from quire.router.table import RoutingTable
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prepared
from quire.worker.text.tokenizer import Tokenizer

MAX_COMPLETIONS = 1024
"""Most completions (prompts × n) of one HTTP request."""


class ModelService(Preparer):
    """Takes requests for one model and has the groups serve them.

    It is made and used inside one event loop. The caller closes ``groups`` and ``table``.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        groups: Groups,
        table: RoutingTable,
        abilities: Abilities | None = None,
        config: GatewayConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or GatewayConfig()
        self.table = table
        self.telemetry = Telemetry(groups=groups, table=table)
        parts = Parts(
            groups=groups,
            table=table,
            tokenizer=tokenizer,
            telemetry=self.telemetry,
            config=self.config.completion,
            clock=clock,
        )
        admission = AdmissionQueue(
            self.config.admission,
            groups=groups,
            table=table,
            registry=self.telemetry.registry,
            start_wait_s=self.config.completion.group_wait_s,
            clock=clock,
        )
        super().__init__(
            model,
            parts,
            config=self.config,
            admission=admission,
            abilities=abilities or Abilities(),
        )
        self._inflight = Inflight(
            self.config.admission.max_inflight,
            "{num} completions are under way, {more} more exceed the gateway's --max-inflight "
            "{limit}: try again in 1 s",
            refused=partial(admission.refused, "inflight"),
        )
        self.pipeline = Pipeline(
            parts,
            meter=self.meter,
            admit=Admit(admission, self._inflight),
            learn=self.constraints.learn,
        )
        self.telemetry.inflight.set_function(lambda: self.num_inflight)

    @property
    def task(self) -> str:
        """The model's task: "generate", "embed" or "score"; empty until a group has named it."""
        return self.groups.task if self.scoring is None else "score"

    @property
    def can_serve(self) -> bool:
        """Whether a group takes requests, or one is started for waiting requests."""
        return self.groups.num_ready > 0 or self.config.wakes_groups

    @property
    def num_inflight(self) -> int:
        """Number of completions in progress."""
        return self._inflight.num

    @property
    def is_idle(self) -> bool:
        """Whether no request is being prepared or in progress."""
        return not (self._preparing or self.num_inflight)

    def check_num_completions(self, num_completions: int) -> None:
        """Raises InvalidRequest: ``num_completions`` are more than `MAX_COMPLETIONS`."""
        if num_completions > MAX_COMPLETIONS:
            raise InvalidRequest(
                f"prompts × n is {num_completions}, at most {MAX_COMPLETIONS} are "
                "allowed in one request: send several",
                param="n",
            )

    async def run(
        self, requests: Sequence[Prepared], take: Take, *, shows_output: bool = True
    ) -> None:
        """Hands the chunks of all completions of one client's request to ``take`` as they arrive.

        ``requests`` are its prompts; completions are numbered across them. ``take`` gets one chunk
        at a time, in order within a completion. Cancelling the task that runs this aborts them all.
        ``shows_output``: `Work.shows_output`.

        Raises what the layers of `quire.cluster.gateway.pipeline` do, and what ``take`` does.
        """
        work = Work(requests=requests, model=self.model, shows_output=shows_output)
        await self.pipeline.run(work, take)
