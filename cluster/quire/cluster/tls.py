"""TLS certificates of gateways and groups.

A gateway reads its certificate again when the files change. A group makes a self-signed one when it
starts and tells gateways which it is, so that none has to be issued, renewed or kept on disk.
"""

import asyncio
import datetime
import logging
import ssl
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.worker.request.errors import ConfigError

_log = logging.getLogger(__name__)

CERTIFICATE_NAME = "group.quire"
"""The host name in each group's own certificate, whatever the group's address."""

_LOOK_EVERY_S = 30.0
_MAX_UNREAD_S = 60.0
"""How long a renewed certificate and key may not match before that is logged."""
_CLOCK_SKEW = datetime.timedelta(days=1)
_LIFETIME = datetime.timedelta(days=36500)
"""Lifetime of a group's own certificate: it is only used until the group's process ends."""


class ServerTls:
    """The certificate chain and the private key of one server, both PEM files.

    Raises:
        ConfigError: A file cannot be read, or the two do not belong together.
    """

    def __init__(self, *, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._unread_since_s: float | None = None
        self.http_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """The context for an HTTP server; new connections get the certificate read last."""
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_certificate={str(certificate)!r} and tls_key={str(key)!r} cannot be used: "
                f"{error}; they must be PEM, a certificate chain and the key of its first"
            ) from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server, which takes the newest certificate at each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._grpc_configuration, self._newest)

    async def follow(self) -> None:
        """Looks for new files until it is cancelled. Unusable files leave the old ones in use."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files again if they have changed."""
        try:
            if self._changed_s() != self._loaded_s:
                self._load()
        except (OSError, ValueError) as error:
            # The two files do not match while one is written and the other is not yet.
            if self._unread_since_s is None:
                self._unread_since_s = time.monotonic()
            elif time.monotonic() - self._unread_since_s > _MAX_UNREAD_S:
                _log.error("the renewed certificate cannot be used, the former one is: %s", error)
                self._unread_since_s = time.monotonic()
        else:
            self._unread_since_s = None

    def _load(self) -> None:
        changed_s = self._changed_s()
        # A new context first: one that does not match its key must not change the one in use.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key)
        self.http_context.load_cert_chain(self._certificate, self._key)
        pair = (self._key.read_bytes(), self._certificate.read_bytes())
        self._grpc_configuration = grpc.ssl_server_certificate_configuration([pair])
        self._loaded_s = changed_s

    def _newest(self) -> grpc.ServerCertificateConfiguration:
        self.refresh()
        return self._grpc_configuration

    def _changed_s(self) -> tuple[float, float]:
        return self._certificate.stat().st_mtime, self._key.stat().st_mtime


@dataclass(frozen=True, kw_only=True)
class OwnTls:
    """A new key and its self-signed certificate, for servers that last as long as their process."""

    grpc_credentials: grpc.ServerCredentials
    context: ssl.SSLContext
    """The context for servers without gRPC."""
    certificate: str
    """The certificate in PEM, which clients must receive because no authority has signed it."""


def trusting_only(certificate: str) -> ssl.SSLContext:
    """The context of a client that trusts only ``certificate``, in PEM."""
    context = ssl.create_default_context(cadata=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def own_tls() -> OwnTls:
    # Imported here, because only groups with TLS need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:  # ssl reads only files; others cannot read this.
        file.write(key_pem + certificate_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return OwnTls(
        grpc_credentials=grpc.ssl_server_credentials([(key_pem, certificate_pem)]),
        context=context,
        certificate=certificate_pem.decode(),
    )
