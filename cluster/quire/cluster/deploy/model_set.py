"""Updates a running gateway's models to a new list of models.

A model that is replaced, or whose settings change, gets a new service beside the old one. New
requests go to the new service once it has a group, or at once if the old one cannot serve; requests
of the old service end there.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cluster.config import ClusterConfig, SharedSettings
from quire.cluster.deploy.listed import Listed
from quire.cluster.deploy.served_model import ServedModel, read_model
from quire.cluster.gateway.models import Models
from quire.router.table import RoutingTable

_log = logging.getLogger(__name__)

_AGAIN_S = 10.0
_LOOK_S = 1.0
_MARGIN_S = 5.0  # Stopping groups end the remaining requests themselves, before this has passed.

Follow = Callable[[Listed, ServedModel], Callable[[], None]]
"""Keeps a model's groups up to date; returns a function that stops that."""


@dataclass(kw_only=True, eq=False)
class _Followed:
    listed: Listed
    served: ServedModel
    stop: Callable[[], None]

    @property
    def can_serve(self) -> bool:
        return self.served.service.can_serve


@dataclass(kw_only=True, eq=False)
class _Place:
    """The services for one model name."""

    listed: Listed
    now: _Followed | None = None
    next: _Followed | None = None
    """The new service, which replaces ``now`` when it can serve."""
    taking_over: asyncio.Task[None] | None = None


class ModelSet:
    """The models of one gateway. It is made and used inside one event loop."""

    def __init__(
        self,
        config: SharedSettings,
        models: Models,
        *,
        make_table: Callable[[ClusterConfig], RoutingTable],
        follow: Follow,
    ) -> None:
        self._config = config
        self._models = models
        self._make_table = make_table
        self._follow = follow
        self._places: dict[str, _Place] = {}
        self._unread: dict[str, Exception] = {}
        """Errors of models whose files could not be read, by name."""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def set(self, listed: Sequence[Listed]) -> None:
        """Replaces the list of models; returns when all have been read. Models that cannot be read
        are tried again later."""
        async with self._lock:
            for name in self._places.keys() - {each.name for each in listed}:
                self._remove(name)
            for each in listed:
                await self._bring(each)
                await self._configure(each)
            self._models.aliases = {
                alias: each.name for each in listed for alias in each.settings.aliases
            }
            names = [each for of in listed for each in (of.name, *of.settings.aliases)]
            self._models.adapters.give_up(names)
            self._places = {each.name: self._places[each.name] for each in listed}
            self._models.arrange(list(self._places))
            self._models.num_groups = sum(each.settings.min_groups for each in listed)

    @property
    def followed(self) -> list[tuple[Listed, ServedModel]]:
        """The models that serve under their names."""
        nows = [place.now for place in self._places.values()]
        return [(each.listed, each.served) for each in nows if each is not None]

    def unsettled(self) -> dict[str, str]:
        """The models whose listed version does not serve here yet, and why."""
        found = {}
        for name, place in self._places.items():
            if place.next is not None:
                troubles = place.next.served.service.groups.troubles()
                found[name] = "; ".join(troubles) or "no group is known yet"
            elif name in self._unread:
                found[name] = str(self._unread[name])
        return found

    def check(self) -> None:
        """Raises the error of a model that cannot be read, if no model could be read."""
        if self._unread and not self.followed:
            raise next(iter(self._unread.values()))

    async def close(self) -> None:
        """Stops following groups, and closes the services that have not taken over. `Models.close`
        closes the others."""
        async with self._lock:
            for task in self._tasks:
                task.cancel()
            for place in self._places.values():
                await self._drop(place)
                if place.now is not None:
                    place.now.stop()

    async def _bring(self, listed: Listed) -> None:
        name = listed.name
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = _Place(listed=listed)
        elif _same(place.listed, listed) and name not in self._unread:
            place.listed = listed
            return
        place.listed = listed
        await self._drop(place)
        if place.now is not None and _same(place.now.listed, listed):
            self._unread.pop(name, None)
            return  # The change was undone.
        if listed.trouble:
            self._unread.pop(name, None)
            self._models.troubles[name] = listed.trouble
            return
        try:
            read = await asyncio.to_thread(read_model, self._config.serving(listed.settings))
        except Exception as error:  # The libraries that read the files raise many kinds.
            _log.exception("the model %s cannot be read", name)
            self._unread[name] = error
            if place.now is None:
                self._models.troubles[name] = str(error)
            self._begin(self._try_again(listed))
            return
        self._unread.pop(name, None)
        self._models.troubles.pop(name, None)
        served = ServedModel(read, table=self._make_table(read.config))
        new = _Followed(listed=listed, served=served, stop=self._follow(listed, served))
        if place.now is None or not place.now.can_serve:
            self._take_over(place, new)
        else:
            place.next = new
            place.taking_over = self._begin(self._take_over_when_ready(place, new))

    async def _configure(self, listed: Listed) -> None:
        await self._models.configure_adapters(listed.name, listed.settings.modules)

    async def _try_again(self, listed: Listed) -> None:
        await asyncio.sleep(_AGAIN_S)
        async with self._lock:
            place = self._places.get(listed.name)
            if place is not None and place.listed is listed:
                await self._bring(listed)
                await self._configure(listed)
                self._models.arrange(list(self._places))

    async def _take_over_when_ready(self, place: _Place, new: _Followed) -> None:
        while not new.can_serve and place.now is not None and place.now.can_serve:
            await new.served.service.groups.wait_for_change(timeout_s=_LOOK_S)
        place.next = place.taking_over = None
        self._take_over(place, new)
        await self._configure(new.listed)

    def _take_over(self, place: _Place, new: _Followed) -> None:
        old, place.now = place.now, new
        self._models.put(new.served.service)
        _log.info("%s is served from %s", new.listed.name, new.listed.part)
        if old is not None:
            self._begin(self._retire(old))

    def _remove(self, name: str) -> None:
        place = self._places.pop(name)
        self._unread.pop(name, None)
        self._models.remove(name)
        self._begin(self._drop(place))
        if place.now is not None:
            self._begin(self._retire(place.now))

    async def _retire(self, old: _Followed) -> None:
        service = old.served.service
        try:
            timeout_s = self._config.drain_timeout_s + _MARGIN_S
            await self._models.retire(service, timeout_s=timeout_s)
        finally:
            old.stop()

    async def _drop(self, place: _Place) -> None:
        """Closes the new service, which has not taken over."""
        new, place.next = place.next, None
        if place.taking_over is not None:
            place.taking_over.cancel()
            place.taking_over = None
        if new is not None:
            new.stop()
            await new.served.service.groups.close()
            new.served.service.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if error := task.exception():
                _log.error("a change of the models failed", exc_info=error)


def _same(one: Listed, other: Listed) -> bool:
    """Whether two models differ only in aliases, configured adapters and number of groups."""
    return _plain(one) == _plain(other)


def _plain(listed: Listed) -> Listed:
    settings = replace(listed.settings, aliases=(), lora_modules=(), num_groups=1)
    return replace(listed, settings=settings)
