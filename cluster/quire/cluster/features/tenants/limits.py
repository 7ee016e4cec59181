"""Limits of tenants at a gateway: requests and tokens per minute, and concurrent completions.

A limit is for all gateways together. Gateways do not tell each other of requests: each grants an
equal part of a limit, so a tenant whose clients all reach one of several gateways gets only that
part. With one gateway limits are exact.

Rates are token buckets that hold a minute's worth. An admitted request takes one from the bucket of
requests, and its prompt tokens from the bucket of tokens; output tokens are taken as they arrive. A
bucket of tokens may become negative: no request is refused for its own size, and later requests
wait longer. A request that is refused because the gateway is overloaded costs nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.cluster.errors import Overloaded, RateLimited, RefusalReason
from quire.worker.request.errors import InvalidRequest

_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1
_CONCURRENCY_RETRY_S = 1.0

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


class TenantPolicy(BaseModel):
    """One tenant's limits and share, as the keys file has them.

    Raises:
        ValidationError: A value is out of its range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    weight: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """The tenant's share of the groups' work relative to other tenants, when requests wait."""
    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    """Prompt tokens, including cached ones, and output tokens."""
    max_concurrent: int | None = Field(default=None, ge=1, le=10**6)
    """Completions in progress, including waiting ones."""
    min_priority: int = Field(default=_MIN_PRIORITY, ge=_MIN_PRIORITY, le=_MAX_PRIORITY)
    max_priority: int = Field(default=_MAX_PRIORITY, ge=_MIN_PRIORITY, le=_MAX_PRIORITY)
    """The highest value of its requests' ``priority``, as ``min_priority`` is the lowest. Lower
    values go first."""
    operator: bool = False
    """Whether the tenant's keys may see and change data of all tenants."""

    @model_validator(mode="after")
    def _check_range(self) -> "TenantPolicy":
        if self.min_priority > self.max_priority:
            raise ValueError(
                f"min_priority {self.min_priority} is above max_priority {self.max_priority}"
            )
        return self

    @property
    def is_limited(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)

    def priority(self, asked: int) -> int:
        """The priority of a request that asks for ``asked``. 0, which is also the default, stands
        for the nearest allowed value.

        Raises:
            InvalidRequest: ``asked`` is not allowed.
        """
        if asked and not self.min_priority <= asked <= self.max_priority:
            raise InvalidRequest(
                f"priority={asked} is not for this API key's tenant: "
                f"{self.min_priority} to {self.max_priority} are",
                param="priority",
            )
        return min(max(asked, self.min_priority), self.max_priority)


NO_LIMITS = TenantPolicy()


class _Bucket:
    """A token bucket that holds a minute's worth, and begins full."""

    def __init__(self) -> None:
        self.level = inf
        self._filled_s = 0.0

    def fill(self, limit: float, now_s: float) -> float:
        """The level now, if ``limit`` are added per minute."""
        came = limit / 60 * (now_s - self._filled_s)
        self.level, self._filled_s = min(limit, self.level + came), now_s
        return self.level


class Account:
    """One tenant's use of its limits at one gateway."""

    def __init__(self) -> None:
        self.requests, self.tokens = _Bucket(), _Bucket()
        self.num_under_way = 0

    def generated(self, num_tokens: int) -> None:
        """Takes output tokens of a running request from the bucket."""
        self.tokens.level -= num_tokens


class Tenants:
    """The tenants of one gateway, over all its models. Belongs to one event loop."""

    def __init__(
        self,
        policies: Mapping[str, TenantPolicy] | None = None,
        *,
        num_gateways: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``num_gateways`` returns the number of gateways that share the limits."""
        self._policies = dict(policies or {})
        self._num_gateways = num_gateways
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def set_policies(self, policies: Mapping[str, TenantPolicy]) -> None:
        """Applies new policies. A tenant that stays keeps its account."""
        self._policies = dict(policies)
        self._accounts = {
            tenant: account for tenant, account in self._accounts.items() if tenant in policies
        }

    def policy(self, tenant: str) -> TenantPolicy:
        return self._policies.get(tenant, NO_LIMITS)

    def check(self, tenant: str, *, num_completions: int = 1) -> None:
        """Checks whether `under_way` would refuse a request.

        Raises:
            RateLimited: The tenant has used up a limit.
            InvalidRequest: The request has more completions than the tenant may ever have.
        """
        policy = self.policy(tenant)
        if not policy.is_limited:
            return
        account, part = self._account(tenant), 1 / self._num_gateways()
        now_s = self._clock()
        if policy.max_concurrent is not None:
            _check_concurrency(account, policy.max_concurrent, part, num_completions)
        if policy.requests_per_minute is not None:
            limit = policy.requests_per_minute * part
            # A part may be less than one request a minute; one is then granted in advance.
            missing = min(1.0, limit) - account.requests.fill(limit, now_s)
            if missing > 0:
                raise _limited("tenant_requests", policy.requests_per_minute, missing / limit * 60)
        if policy.tokens_per_minute is not None:
            limit = policy.tokens_per_minute * part
            missing = -account.tokens.fill(limit, now_s)
            if missing >= 0:
                wait_s = (missing + 1) / limit * 60
                raise _limited("tenant_tokens", policy.tokens_per_minute, wait_s)

    @contextmanager
    def under_way(
        self, tenant: str, *, num_completions: int, num_prompt_tokens: int
    ) -> Iterator[Account | None]:
        """Counts a client's request while the block runs. Yields the tenant's account, or ``None``
        if the tenant has no limits. Raises as `check`; nothing has changed then."""
        self.check(tenant, num_completions=num_completions)
        if not self.policy(tenant).is_limited:
            yield None
            return
        account = self._account(tenant)
        account.num_under_way += num_completions
        account.requests.level -= 1
        account.tokens.level -= num_prompt_tokens
        try:
            yield account
        except Overloaded:  # Only raised before a group has the request: it made no output.
            account.requests.level += 1
            account.tokens.level += num_prompt_tokens
            raise
        finally:
            account.num_under_way -= num_completions

    def headers(self, tenant: str) -> dict[str, str]:
        """OpenAI's rate limit headers for a tenant: what is left over all gateways, as estimated by
        this one. Empty without rates."""
        policy = self.policy(tenant)
        if policy.requests_per_minute is None and policy.tokens_per_minute is None:
            return {}
        account, num_gateways, now_s = self._account(tenant), self._num_gateways(), self._clock()
        headers: dict[str, str] = {}
        for name, limit, bucket in (
            ("requests", policy.requests_per_minute, account.requests),
            ("tokens", policy.tokens_per_minute, account.tokens),
        ):
            if limit is not None:
                left = bucket.fill(limit / num_gateways, now_s) * num_gateways
                full_s = (limit - left) / limit * 60
                told = (str(limit), str(max(int(left), 0)), duration(full_s))
                headers |= zip([each for each in LIMIT_HEADERS if name in each], told, strict=True)
        return headers

    def _account(self, tenant: str) -> Account:
        """The tenant's account. Only for tenants with a policy, whose number is bounded."""
        return self._accounts.setdefault(tenant, Account())


def duration(seconds: float) -> str:
    """A duration as OpenAI's API writes it: ``120ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    if seconds < 1:
        return f"{max(round(seconds * 1000), 0)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _check_concurrency(account: Account, limit: int, part: float, num_completions: int) -> None:
    """Checks the limit of concurrent completions. A tenant without running ones may always run one
    request within ``limit``, even if that exceeds this gateway's part."""
    if num_completions > limit:
        raise InvalidRequest(
            f"the request is for {num_completions} completions: this API key's tenant may have "
            f"{limit} under way: send several requests",
            param="n",
        )
    num = account.num_under_way
    if num and num + num_completions > limit * part:
        raise RateLimited(
            f"this API key's tenant has {num} completions under way here and may have {limit} at "
            "all gateways together; try again when one has ended",
            reason="tenant_concurrency",
            retry_after_s=_CONCURRENCY_RETRY_S,
        )


def _limited(reason: RefusalReason, limit: int, wait_s: float) -> RateLimited:
    what = "requests" if reason == "tenant_requests" else "tokens"
    retry_after_s = max(wait_s, 1.0)
    return RateLimited(
        f"this API key's tenant has used up its {limit} {what} per minute; "
        f"try again in {retry_after_s:.0f} s",
        reason=reason,
        retry_after_s=retry_after_s,
    )
