"""The gRPC server that a command asks, and what to print where a call of it fails."""

import re
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.worker.request.errors import ConfigError

# gRPC's own messages for a server that it could not reach.
_NOBODY_THERE = re.compile("failed to connect|errors resolving")
_HOST_AND_PORT = re.compile(r"(?:dns:///)?[^/\s]+:(\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Server:
    """The address of a gRPC server, and the credentials for it.

    Raises:
        ConfigError: ``address`` is invalid, or ``api_key`` cannot be sent.
    """

    address: str
    """``host:port``."""
    tls: bool = False
    tls_ca: Path | None = None
    """Certificates of the authorities to trust, PEM; implies ``tls``. ``None`` trusts the
    well-known authorities."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        # gRPC itself takes port 443 if there is none, and the lower 16 bits of one too large.
        found = _HOST_AND_PORT.fullmatch(self.address)
        if not found or not 0 < int(found[1]) < 2**16:
            raise ConfigError(
                f"address={self.address!r}: must be host:port, such as 127.0.0.1:50051"
            )
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key: has characters that cannot be sent; is it one line?")

    def channel(self) -> grpc.Channel:
        """A new channel to the server.

        Raises:
            ConfigError: ``tls_ca`` cannot be read, or is no certificate.
        """
        if not (self.tls or self.tls_ca):
            return grpc.insecure_channel(self.address)
        root = None
        if self.tls_ca is not None:
            try:
                # gRPC accepts any bytes, and logs an error only at the first call.
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.tls_ca)
                root = self.tls_ca.read_bytes()
            except OSError as error:  # OpenSSL's errors are OSErrors too.
                raise ConfigError(
                    f"tls_ca={str(self.tls_ca)!r} cannot be used: {error}; it must be the "
                    "authority's certificate as PEM"
                ) from error
        return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(root))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata to send with each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def print_rpc_error(server: Server, error: grpc.RpcError) -> None:
    """Prints a failed call's status to standard error, with a hint if there is one."""
    details = error.details() or ""
    hint = ""
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        hint = "; here, set QUIRE_API_KEY to one of the server's keys"
    elif "CERTIFICATE_VERIFY_FAILED" in details:
        hint = (
            "; --tls-ca names the authority that signed the server's certificate, and --address "
            "must have the host of the certificate"
        )
    elif error.code() == grpc.StatusCode.UNAVAILABLE and _NOBODY_THERE.match(details):
        hint = (
            "; does `quire serve` run there? --address names its gRPC port, not that of HTTP; "
            "--tls or --tls-ca is for a server with TLS, and for no other"
        )
    print(f"quire: {server.address}: {error.code().name}: {details}{hint}", file=sys.stderr)
