"""The models that a gateway serves, by the names that clients call them. They come and go.

What belongs to no one model is here: readiness, the drain, the memory of bodies whose model is not
known yet, and the page of metrics.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.cluster.errors import ModelNotFound, Unavailable
from quire.cluster.serving.adapters import Adapters
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.bounds import ByteBudget
from quire.cluster.serving.service import ModelService
from quire.cluster.serving.tenants import Tenants
from quire.cluster.telemetry.call_spans import spans_of
from quire.cluster.telemetry.explanations import Explanations
from quire.cluster.telemetry.live import Live, Watched
from quire.cluster.telemetry.metrics import GatewayTelemetry
from quire.cluster.telemetry.timeline import Timeline
from quire.cluster.telemetry.usage import UsageLedger
from quire.worker.api.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.cluster.telemetry.span_export import SpanExport

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_LINGER_S = 1.0
"""A request may have found its model and not begun to be prepared."""
_LOOK_S = 0.1


class Models:
    """The `ModelService`s of one event loop, which come and go; all are closed with it."""

    def __init__(
        self,
        *services: ModelService,
        aliases: Mapping[str, str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """``aliases``: further names, and the models that they mean. ``max_body_bytes``: of large
        requests that are held at a time, until they are tokenized. Past that, an HTTP request waits
        unread, and a gRPC request, which has been read already, is refused."""
        self.by_name: dict[str, ModelService] = {}
        self.aliases: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        """Why a model cannot be served, by its name; it may have no service then."""
        self._leaving: list[ModelService] = []
        self.adapters = Adapters(self)
        self.tenants = Tenants(num_gateways=lambda: self._num_gateways)
        self.usage = UsageLedger()
        self.explanations = Explanations(lambda: [each.table for each in self._all])
        self.live = Live(lambda: [_watched(each) for each in self._all])
        self.bodies = ByteBudget(max_body_bytes)
        """Bytes that transports may read before `ModelService.prepare` has returned."""
        self.telemetry = GatewayTelemetry()
        self.telemetry.register(self.usage)
        self.telemetry.body_bytes.set_function(lambda: self.bodies.held)
        self.on_finished: list[Callable[[Timeline], object]] = [
            self.telemetry.count,
            self.live.note,
        ]
        """Called with each client's call that has ended. None of them may wait."""
        self.traces: SpanExport | None = None
        """The exporter of the calls' spans; ``None`` if nobody wants them."""
        self.is_draining = False
        self._watchers: list[Callable[[], None]] = []
        for service in services:
            self.put(service)
        self.aliases.update(aliases or {})

    def put(self, service: ModelService) -> None:
        """Serves a model from now on, in place of the one that has its name, which is for `retire`
        to end."""
        name = service.model
        if name in self.by_name:
            self._leaving.append(self.by_name[name])
        self.by_name[name] = service
        service.meter_by(self.tenants, self.usage)
        self.telemetry.add(name, service.telemetry.registry)
        service.groups.watch(self._notify)
        if self.is_draining:
            service.groups.begin_drain()
        self._notify()

    async def configure_adapters(self, name: str, sources: Mapping[str, str]) -> None:
        """Gives a model its adapters of the configuration, sources by name, where it is served and
        takes some."""
        if name in self.by_name and self.by_name[name].keeper is not None:
            await self.adapters.configure(name, sources)

    def remove(self, name: str) -> None:
        """Takes no new requests for a model. `retire` ends its service."""
        self.troubles.pop(name, None)
        if name in self.by_name:
            self._leaving.append(self.by_name.pop(name))
        self.aliases = {alias: of for alias, of in self.aliases.items() if of != name}
        self._notify()

    def arrange(self, names: Sequence[str]) -> None:
        """Sets the order in which models are listed."""
        self.by_name = {name: self.by_name[name] for name in names if name in self.by_name}

    async def retire(self, service: ModelService, *, timeout_s: float) -> None:
        """Lets the requests of one that was replaced or removed end, for up to ``timeout_s``, and
        closes it."""
        clock = asyncio.get_running_loop().time
        end_s = busy_s = clock()
        end_s += timeout_s
        while (now_s := clock()) < end_s and now_s - busy_s < _LINGER_S:
            if not service.is_idle:
                busy_s = now_s
            await asyncio.sleep(_LOOK_S)
        service.groups.expect_no_more(f"the model {service.model!r} is served here no longer")
        await _close(service)
        self._leaving.remove(service)
        self.telemetry.remove(service.model, service.telemetry.registry)

    def named(self, name: str | None) -> ModelService:
        """The model, or a model's adapter, that a request names; it need not where there is one
        model only. Raises as `model`."""
        if name and name not in self.by_name and (adapted := self.adapters.named(name)):
            return adapted
        return self.model(name)

    def model(self, name: str | None) -> ModelService:
        """The same, of models alone.

        Raises:
            ModelNotFound: It is not served here.
            InvalidRequest: No name is given, and there are several.
            Unavailable: It is one of ``troubles`` that has no service.
        """
        known = ", ".join(map(repr, self.by_name)) or "none"
        name = self.aliases.get(name or "", name)
        if not name:
            if len(self.by_name) != 1:
                raise InvalidRequest(f"model is missing: name one of {known}", param="model")
            (name,) = self.by_name
        if name in self.by_name:
            return self.by_name[name]
        if name in self.troubles:
            raise Unavailable(f"the model {name!r} cannot be served: {self.troubles[name]}")
        known += "".join(f", {each.name!r}" for each in self.adapters)
        are = "are" if "," in known else "is"
        raise ModelNotFound(f"the model {name!r} does not exist: {known} {are} served")

    @property
    def is_ready(self) -> bool:
        """Whether new requests should come here: one model's troubles do not stop the others."""
        return not self.is_draining and any(each.can_serve for each in self.by_name.values())

    @property
    def num_ready_groups(self) -> int:
        return sum(each.groups.num_ready for each in self.by_name.values())

    @property
    def max_inflight(self) -> int:
        """Completions that may be under way, of all models together."""
        found = sum(each.config.admission.max_inflight for each in self._all)
        return found or AdmissionConfig.max_inflight

    @property
    def num_inflight(self) -> int:
        """Completions under way, those of models that leave among them."""
        return sum(each.num_inflight for each in self._all)

    def begin_drain(self) -> None:
        """Tells health checks that no new requests should come; those that do are served."""
        self.is_draining = True
        self.live.end()
        for service in self._all:
            service.groups.begin_drain()
        self._notify()

    async def close(self) -> None:
        """Detaches from every group, and ends what prepares requests."""
        self.live.end()
        self.adapters.close()
        for service in self._all:
            await _close(service)

    @property
    def _num_gateways(self) -> int:
        """Those that send requests to the groups, this one among them, as the groups say."""
        return max((each.table.num_gateways for each in self._all), default=1)

    @property
    def _all(self) -> list[ModelService]:
        return [*self.by_name.values(), *self._leaving]

    def trace_to(self, traces: "SpanExport") -> None:
        """Sends the spans of calls there from now on. They stay the caller's to close."""
        self.traces = traces
        traces.count = lambda outcome, num: self.telemetry.spans.labels(outcome).inc(num)
        self.on_finished.append(lambda call: traces.add(spans_of(call)))

    def began(
        self, call: Timeline, traceparents: Sequence[str], tracestates: Sequence[str]
    ) -> None:
        """Makes a call that has arrived part of a trace, where spans are wanted. The last two are
        the values of its headers."""
        if self.traces is None:
            return
        try:
            self.traces.begin(call, traceparents=traceparents, tracestates=tracestates)
        except Exception:
            _log.exception("a call could not be made part of a trace")

    def finished(self, call: Timeline) -> None:
        """Tells all of ``on_finished`` of a call that has ended."""
        for hear in self.on_finished:
            try:
                hear(call)
            except Exception:
                _log.exception("a finished call could not be told of")

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` when `is_ready` may have changed."""
        self._watchers.append(on_change)

    def _notify(self) -> None:
        for on_change in self._watchers:
            on_change()


def _watched(service: ModelService) -> Watched:
    return Watched(
        service.model,
        service.groups,
        service.table,
        service.telemetry,
        service.task,
        num_queued=service.admission.queued.num_requests,
        num_inflight=service.num_inflight,
    )


async def _close(service: ModelService) -> None:
    await service.groups.close()
    service.close()
