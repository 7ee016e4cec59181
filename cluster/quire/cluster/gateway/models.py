"""The models that a gateway serves, by name. Models can be added, replaced and removed at any time.

This module also has everything that belongs to the gateway and not to one model: readiness, the
drain, the memory for bodies whose model is not known yet, and the metrics page.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.cluster.errors import ModelNotFound, Unavailable
from quire.cluster.features.adapters.catalog import Adapters
from quire.cluster.features.explain.explanations import Explanations
from quire.cluster.features.live.live import Live, Watched
from quire.cluster.features.tenants.limits import Tenants
from quire.cluster.features.tenants.usage import UsageLedger
from quire.cluster.features.tracing.call_spans import spans_of
from quire.cluster.gateway.service import ModelService
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.bounds import Budget, Turns
from quire.cluster.telemetry.metrics import GatewayTelemetry
from quire.cluster.telemetry.timeline import Timeline
from quire.worker.request.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.cluster.features.tracing.span_export import SpanExport

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
_LINGER_S = 1.0
"""How long a service must be idle to be closed: a request may have found its model, but not begun
to be prepared."""
_LOOK_S = 0.1


class Models:
    """The `ModelService`s of one event loop; `close` closes all of them."""

    def __init__(
        self,
        *services: ModelService,
        aliases: Mapping[str, str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """``aliases``: models by further names. ``max_body_bytes``: total size of large requests
        that are in memory at a time, until they are tokenized. Beyond that, an HTTP request waits
        unread, and a gRPC request, which has been read already, is refused."""
        self.by_name: dict[str, ModelService] = {}
        self.aliases: dict[str, str] = {}
        self.troubles: dict[str, str] = {}
        """Why a model cannot be served, by its name. Such a model may have no service."""
        self.num_groups = 0
        """How many groups the models should have at least; 0 if that is not known."""
        self._leaving: list[ModelService] = []
        self.adapters = Adapters(self)
        self.tenants = Tenants(num_gateways=lambda: self._num_gateways)
        self.usage = UsageLedger()
        self.explanations = Explanations(lambda: [each.table for each in self._all])
        self.live = Live(lambda: [_watched(each) for each in self._all])
        self.bodies = Budget(max_body_bytes)
        """The budget of bytes that transports may hold until `ModelService.prepare` returns."""
        self.turns = Turns()
        """The turns in which transports begin calls."""
        self.telemetry = GatewayTelemetry()
        self.telemetry.register(self.usage)
        self.telemetry.body_bytes.set_function(lambda: self.bodies.held)
        self.on_finished: list[Callable[[Timeline], object]] = [
            self.telemetry.count,
            self.live.note,
        ]
        """Functions that are called with each client's call that has ended. They must not block."""
        self.traces: SpanExport | None = None
        """The exporter of the calls' spans; ``None`` if tracing is off."""
        self.is_draining = False
        self._watchers: list[Callable[[], None]] = []
        for service in services:
            self.put(service)
        self.aliases.update(aliases or {})

    def put(self, service: ModelService) -> None:
        """Serves a model from now on, in place of a model of the same name. The caller ends the
        latter with `retire`."""
        name = service.model
        if name in self.by_name:
            self._leaving.append(self.by_name[name])
        self.by_name[name] = service
        service.meter.share(self.tenants, self.usage)
        self.telemetry.add(name, service.telemetry.registry)
        service.groups.watch(self._notify)
        if self.is_draining:
            service.groups.begin_drain()
        self._notify()

    async def configure_adapters(self, name: str, sources: Mapping[str, str]) -> None:
        """Serves a model's configured adapters, ``sources`` by name. Does nothing if the model is
        not served or takes no adapters."""
        if name in self.by_name and self.by_name[name].keeper is not None:
            await self.adapters.configure(name, sources)

    def remove(self, name: str) -> None:
        """Stops taking new requests for a model. `retire` ends its service."""
        self.troubles.pop(name, None)
        if name in self.by_name:
            self._leaving.append(self.by_name.pop(name))
        self.aliases = {alias: of for alias, of in self.aliases.items() if of != name}
        self._notify()

    def arrange(self, names: Sequence[str]) -> None:
        """Sets the order in which models are listed."""
        self.by_name = {name: self.by_name[name] for name in names if name in self.by_name}

    async def retire(self, service: ModelService, *, timeout_s: float) -> None:
        """Closes the service of a model that was replaced or removed, once its requests have ended
        or ``timeout_s`` has passed."""
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
        """The service for the model or adapter that a request names; ``None`` stands for the only
        model. Raises as `model`."""
        if name and name not in self.by_name and (adapted := self.adapters.named(name)):
            return adapted
        return self.model(name)

    def model(self, name: str | None) -> ModelService:
        """The service for the model that a request names; ``None`` stands for the only model.

        Raises:
            ModelNotFound: The model is not served here.
            InvalidRequest: No name is given, and there are several models.
            Unavailable: The model is one of ``troubles`` and has no service.
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
        """Whether the gateway is ready for new requests: it does not drain, and can serve at least
        one model."""
        return not self.is_draining and any(each.can_serve for each in self.by_name.values())

    @property
    def num_ready_groups(self) -> int:
        return sum(each.groups.num_ready for each in self.by_name.values())

    @property
    def max_inflight(self) -> int:
        """Most completions that may be in progress, over all models."""
        found = sum(each.config.admission.max_inflight for each in self._all)
        return found or AdmissionConfig.max_inflight

    @property
    def num_inflight(self) -> int:
        """Completions in progress, including those of models that were replaced or removed."""
        return sum(each.num_inflight for each in self._all)

    def begin_drain(self) -> None:
        """Makes health checks report that no new requests should arrive. Requests that still arrive
        are served."""
        self.is_draining = True
        self.live.end()
        for service in self._all:
            service.groups.begin_drain()
        self._notify()

    async def close(self) -> None:
        """Detaches from every group, and ends the threads and processes that prepare requests."""
        self.live.end()
        self.adapters.close()
        for service in self._all:
            await _close(service)

    @property
    def _num_gateways(self) -> int:
        """Number of gateways that send requests to the groups, including this one, as the groups
        report it."""
        return max((each.table.num_gateways for each in self._all), default=1)

    @property
    def _all(self) -> list[ModelService]:
        return [*self.by_name.values(), *self._leaving]

    def trace_to(self, traces: "SpanExport") -> None:
        """Sends the spans of calls to ``traces`` from now on. The caller closes ``traces``."""
        self.traces = traces
        traces.count = lambda outcome, num: self.telemetry.spans.labels(outcome).inc(num)
        self.on_finished.append(lambda call: traces.add(spans_of(call)))

    def began(
        self, call: Timeline, traceparents: Sequence[str], tracestates: Sequence[str]
    ) -> None:
        """Makes a new call part of a trace, if tracing is on. ``traceparents`` and ``tracestates``
        are the values of its headers of these names."""
        if self.traces is None:
            return
        try:
            self.traces.begin(call, traceparents=traceparents, tracestates=tracestates)
        except Exception:
            _log.exception("a call could not be made part of a trace")

    def finished(self, call: Timeline) -> None:
        """Calls all of ``on_finished`` with a call that has ended."""
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
