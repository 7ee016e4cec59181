"""Counts each request's tokens: against its tenant's limits as they arrive, and for its API key at
the end."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from quire.cluster.errors import RateLimited, RefusalReason
from quire.cluster.failover.chunk import Chunk
from quire.cluster.serving.tenants import Account, TenantPolicy, Tenants
from quire.cluster.telemetry.usage import Counts, UsageLedger
from quire.worker.api.request import Prepared


class Used:
    """The tokens that one client's request has used."""

    def __init__(self) -> None:
        self.counts = Counts(requests=1)
        self.account: Account | None = None
        """The account of its tenant's limits; ``None`` if the tenant has none."""

    def took(self, chunk: Chunk) -> int:
        """Counts a chunk; returns the number of cached prompt tokens in its `Start`, if any."""
        num_tokens, counts = len(chunk.token_ids), self.counts
        counts.output_tokens += num_tokens
        if self.account is not None:
            self.account.generated(num_tokens)
        if chunk.start is None:
            return 0
        counts.prompt_tokens += chunk.start.num_prompt_tokens
        counts.cached_tokens += chunk.start.num_cached_tokens
        return chunk.start.num_cached_tokens


class Metering:
    """Counts the requests of one model, by tenant and API key."""

    def __init__(
        self, tenants: Tenants, usage: UsageLedger, *, refused: Callable[[RefusalReason], object]
    ) -> None:
        """``refused`` is called with the reason of each refusal for a limit."""
        self._tenants = tenants
        self._usage = usage
        self._refused = refused

    def policy(self, tenant: str) -> TenantPolicy:
        return self._tenants.policy(tenant)

    def check(self, tenant: str) -> None:
        """Raises RateLimited: `metered` would refuse the tenant's request."""
        with self._counting_refusals():
            self._tenants.check(tenant)

    @contextmanager
    def metered(
        self, first: Prepared, *, num_completions: int, num_prompt_tokens: int
    ) -> Iterator[Used]:
        """Counts a client's request, of which ``first`` is the first prompt, while the block runs.

        Raises:
            RateLimited: The tenant has used up one of its limits.
            InvalidRequest: ``num_completions`` exceed what the tenant may ever have in progress.
        """
        used = Used()
        with ExitStack() as under_way:
            with self._counting_refusals():
                used.account = under_way.enter_context(
                    self._tenants.under_way(
                        first.tenant,
                        num_completions=num_completions,
                        num_prompt_tokens=num_prompt_tokens,
                    )
                )
            try:
                yield used
            finally:
                self._usage.record(first.tenant, first.key_name, used.counts)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            self._refused(error.reason)
            raise
