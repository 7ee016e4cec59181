"""A gateway's certificate, read again when its files change: who renews it restarts nothing."""

import asyncio
import ssl
from pathlib import Path

import grpc

from quire.worker.errors import ConfigError

_LOOK_EVERY_S = 30.0


class ServerTls:
    """The certificate chain and the private key of one server, both PEM files.

    Raises:
        ConfigError: A file cannot be read, or the two do not belong together.
    """

    def __init__(self, *, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self.http_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For an HTTP server; new connections get the certificate that `follow` has read last."""
        try:
            self._load()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_certificate={str(certificate)!r} and tls_key={str(key)!r} cannot be used: "
                f"{error}; they must be PEM, a certificate chain and the key of its first"
            ) from error

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; it asks for the newest certificate at each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._grpc_configuration, self._newest)

    async def follow(self) -> None:
        """Looks for new files until it is cancelled. Unusable ones leave the old in place."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files anew where they have changed."""
        try:
            if self._changed_s() != self._loaded_s:
                self._load()
        except (OSError, ValueError):
            # Between the writing of the one file and of the other they do not match.
            return

    def _load(self) -> None:
        changed_s = self._changed_s()
        # First here, where a certificate that does not fit its key is noticed.
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
