"""Who may make a call: each HTTP route and each gRPC method declares it where it is defined.

A route or a method that declares nothing does not start: `routes.application` and `rpc_access`
refuse it. A gRPC method that no service declares is an operator's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from quire.cluster.errors import NotAnOperator, Unauthenticated

F = TypeVar("F", bound=Callable[..., Any])

REFUSAL = "no API key, or one that is not known here: send 'Authorization: Bearer KEY'"
_NO_OPERATOR = (
    "the API key is no operator's: in the file of keys, its line is 'KEY *', or its tenant has "
    "'operator: true'"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The owner of a request, by its API key."""

    tenant: str = ""
    """Has no "/" and reveals nothing of a key; empty if no keys are configured."""
    key_name: str = ""
    """The name of the tenant's key that was shown; empty if keys have no names."""
    is_operator: bool = False
    """Whether the caller sees the routing decisions on all tenants' requests."""

    @property
    def sees(self) -> str | None:
        """The tenant whose decisions the caller sees; ``None`` means all tenants."""
        return None if self.is_operator else self.tenant


EVERYONE = Caller(is_operator=True)
"""The caller of a gateway without keys."""


class Access(Enum):
    OPEN = "everyone, without a key: the answer reveals nothing of what clients ask"
    KEY = "everyone with a key: the answer is about the caller's own tenant"
    OPERATOR = "operators: the call shows data of all tenants, or changes what is served"


def check_access(access: Access, caller: Caller | None) -> None:
    """Raises Unauthenticated or NotAnOperator unless ``caller`` may make the call. ``None`` is a
    caller without a known key."""
    if access is Access.OPEN:
        return
    if caller is None:
        raise Unauthenticated(REFUSAL)
    if access is not Access.KEY and not caller.is_operator:
        raise NotAnOperator(_NO_OPERATOR)


def allows(access: Access) -> Callable[[F], F]:
    """Declares who may call a method of a gRPC servicer."""

    def declare(method: F) -> F:
        method.access = access  # type: ignore[attr-defined]
        return method

    return declare


def rpc_access(service: ServiceDescriptor, servicer: object) -> Mapping[str, Access]:
    """What the methods of ``servicer`` declare, by the path of the call. Raises TypeError if one
    declares nothing."""
    declared = {}
    for method in service.methods:
        access = getattr(getattr(servicer, method.name, None), "access", None)
        if not isinstance(access, Access):
            raise TypeError(f"{service.full_name}.{method.name} does not declare who may call it")
        declared[f"/{service.full_name}/{method.name}"] = access
    return declared
