"""The models that a gateway serves, by the names that clients call them.

What belongs to no one model is here: readiness, the drain, the memory of bodies whose model is not
known yet, and the page of metrics.
"""

from collections.abc import Callable, Mapping

from quire.cluster.errors import ModelNotFound
from quire.cluster.serving.adapters import Adapters
from quire.cluster.serving.bounds import ByteBudget
from quire.cluster.serving.service import ModelService
from quire.cluster.telemetry.explanations import Explanations
from quire.cluster.telemetry.metrics import GatewayTelemetry
from quire.worker.api.errors import InvalidRequest

MAX_BODY_BYTES = 32 * 2**20


class Models:
    """One or more `ModelService` of one event loop; they are closed with it."""

    def __init__(
        self,
        *services: ModelService,
        aliases: Mapping[str, str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """``aliases``: further names, and the models that they mean. ``max_body_bytes``: of large
        requests that are held at a time, until they are tokenized. Past that, an HTTP request waits
        unread, and a gRPC request, which has been read already, is refused."""
        self.by_name = {service.model: service for service in services}
        self.aliases = dict(aliases or {})
        assert len(self.by_name) == len(services) > 0
        self.adapters = Adapters(self)
        self.explanations = Explanations([service.table for service in services])
        self.bodies = ByteBudget(max_body_bytes)
        """For the transports, of what they read before `ModelService.prepare` has returned."""
        self.telemetry = GatewayTelemetry(
            {name: service.telemetry.registry for name, service in self.by_name.items()}
        )
        self.telemetry.body_bytes.set_function(lambda: self.bodies.held)
        self.is_draining = False
        self._watchers: list[Callable[[], None]] = []
        for service in services:
            service.groups.watch(self._notify)

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
        """
        known = ", ".join(map(repr, self.by_name))
        name = self.aliases.get(name or "", name)
        if name:
            if name not in self.by_name:
                known += "".join(f", {each.name!r}" for each in self.adapters)
                are = "are" if "," in known else "is"
                raise ModelNotFound(f"the model {name!r} does not exist: {known} {are} served")
            return self.by_name[name]
        if len(self.by_name) > 1:
            raise InvalidRequest(f"model is missing: name one of {known}", param="model")
        (service,) = self.by_name.values()
        return service

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
        return sum(each.config.admission.max_inflight for each in self.by_name.values())

    @property
    def num_inflight(self) -> int:
        """Completions under way."""
        return sum(each.num_inflight for each in self.by_name.values())

    def begin_drain(self) -> None:
        """Tells health checks that no new requests should come; those that do are served."""
        self.is_draining = True
        for service in self.by_name.values():
            service.groups.begin_drain()
        self._notify()

    async def close(self) -> None:
        """Detaches from every group, and ends what prepares requests."""
        self.adapters.close()
        for service in self.by_name.values():
            await service.groups.close()
            service.close()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` when `is_ready` may have changed."""
        self._watchers.append(on_change)

    def _notify(self) -> None:
        for on_change in self._watchers:
            on_change()
