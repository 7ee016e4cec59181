"""The private parts of uvicorn that a connection extends: its protocol and the cycle of a request.

uvicorn documents neither. So `check_uvicorn` checks that the installed version has every attribute
that `quire.cluster.features.guard.connection` and `quire.cluster.features.guard.listener` use.
"""

import functools

import uvicorn
from uvicorn.protocols.http import httptools_impl

from quire.cluster.private import unknown_version

TESTED = ("0.53.0", "0.54.0")
"""The lowest and highest versions of uvicorn that Quire's tests ran with."""
_INSTALL = "uvicorn>=0.53,<0.55"

_USED = {
    (httptools_impl, "HttpToolsProtocol"): (
        *("config", "app", "loop", "parser", "transport", "flow", "headers", "cycle"),
        *("timeout_keep_alive", "timeout_keep_alive_task", "timeout_keep_alive_handler"),
        *("connection_made", "connection_lost", "data_received", "_unset_keepalive_if_required"),
        *("on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
        "send_400_response",
    ),
    (httptools_impl, "RequestResponseCycle"): (
        *("send", "keep_alive", "response_started", "response_complete"),
        *("chunked_encoding", "expected_content_length"),
    ),
    (uvicorn, "Server"): ("config", "server_state", "should_exit", "serve", "capture_signals"),
}
"""Private attributes, by module and class."""


@functools.cache
def check_uvicorn() -> None:
    """Raises ConfigError if the installed version of uvicorn lacks parts that Quire uses."""
    missing = [] if hasattr(httptools_impl, "STATUS_LINE") else ["STATUS_LINE"]
    for (module, name), attributes in _USED.items():
        found = getattr(module, name, None)
        if found is None:
            missing.append(name)
            continue
        # Also accepts attributes that the constructor sets on instances.
        has = {*dir(found), *found.__init__.__code__.co_names}
        missing += [f"{name}.{each}" for each in attributes if each not in has]
    if missing:
        raise unknown_version("uvicorn", missing, tested=TESTED, install=_INSTALL)
