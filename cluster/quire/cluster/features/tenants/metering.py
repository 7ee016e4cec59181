"""The layer that counts a request's tokens: against its tenant's limits as they arrive, and for its
API key at the end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from quire.cluster.errors import RateLimited, RefusalReason
from quire.cluster.features.tenants.limits import Account, TenantPolicy, Tenants
from quire.cluster.features.tenants.usage import Counts, UsageLedger
from quire.cluster.gateway.work import Run, Take, Work
from quire.worker.request.request import Prepared


class Used:
    """The tokens that one client's request has used.

    The prompt of several completions counts once, with the cached tokens of the first of them, as
    in the answer. It counts once a group has begun it, even if the client leaves before its first
    token; a group that is lost later, or takes over, adds nothing.
    """

    def __init__(
        self,
        prompt_lens: Sequence[int] = (),
        *,
        num_per_prompt: int = 1,
        shows_output: bool = False,
    ) -> None:
        """``shows_output``: whether output tokens are part of the answer. Some answers are about
        the prompt alone, though a token is generated for them."""
        self.counts = Counts(requests=1)
        self.account: Account | None = None
        """The account of its tenant's limits; ``None`` if the tenant has none."""
        self._unbegun = dict(enumerate(prompt_lens))
        """Lengths of the prompts that no group has begun, by number."""
        self._num_per_prompt = num_per_prompt
        self._shows_output = shows_output

    @classmethod
    def by(cls, requests: Sequence[Prepared], *, shows_output: bool) -> "Used":
        """For a request with the prompts ``requests``."""
        lens = [len(each.prompt_token_ids) for each in requests]
        return cls(lens, num_per_prompt=requests[0].sampling.n, shows_output=shows_output)

    def took(self, index: int, *, num_tokens: int, num_cached_tokens: int) -> None:
        """Counts a group's work, as `quire.cluster.gateway.work.Count` does."""
        self.counts.prompt_tokens += self._unbegun.pop(index // self._num_per_prompt, 0)
        if self._shows_output:
            self.counts.output_tokens += num_tokens
            if self.account is not None:
                self.account.generated(num_tokens)
        self.counts.cached_tokens += num_cached_tokens


class Meter:
    """Counts the requests of one model, by tenant and API key."""

    def __init__(self, *, refused: Callable[[RefusalReason], object]) -> None:
        """``refused`` is called with the reason of each refusal for a limit."""
        self._refused = refused
        self.share(Tenants(), UsageLedger())

    def share(self, tenants: Tenants, usage: UsageLedger) -> None:
        """Enforces the limits of ``tenants`` and counts requests in ``usage`` from now on. All
        models of a gateway share both."""
        self._tenants = tenants
        self._usage = usage

    async def __call__(self, work: Work, take: Take, run: Run[Work]) -> None:
        """Raises as `metered`."""
        first = work.first
        used = Used.by(work.requests, shows_output=work.shows_output)
        work.weight = self.policy(first.tenant).weight
        work.counts.append(used.took)
        with self.metered(
            first.tenant,
            first.key_name,
            used,
            num_completions=work.num_completions,
            num_prompt_tokens=work.num_prompt_tokens,
        ):
            await run(work, take)

    def policy(self, tenant: str) -> TenantPolicy:
        return self._tenants.policy(tenant)

    def check(self, tenant: str) -> None:
        """Raises RateLimited: `metered` would refuse the tenant's request."""
        with self._counting_refusals():
            self._tenants.check(tenant)

    @contextmanager
    def metered(
        self,
        tenant: str,
        key_name: str,
        used: Used | None = None,
        *,
        num_completions: int = 1,
        num_prompt_tokens: int = 0,
    ) -> Iterator[None]:
        """Counts a client's request, and at its end what it has ``used``, while the block runs. A
        call that uses no group counts as a request alone.

        Raises:
            RateLimited: The tenant has used up one of its limits.
            InvalidRequest: ``num_completions`` exceed what the tenant may ever have in progress.
        """
        used = used or Used()
        with ExitStack() as under_way:
            with self._counting_refusals():
                used.account = under_way.enter_context(
                    self._tenants.under_way(
                        tenant,
                        num_completions=num_completions,
                        num_prompt_tokens=num_prompt_tokens,
                    )
                )
            try:
                yield
            finally:
                self._usage.record(tenant, key_name, used.counts)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            self._refused(error.reason)
            raise
