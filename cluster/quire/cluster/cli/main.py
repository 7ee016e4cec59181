"""The command line. Flags are read in this module and its siblings, nowhere else.

Heavy imports wait until a command needs them, so that ``--help`` and errors in flags are answered
at once.
"""

import os
import sys
from collections.abc import Sequence

from quire.cluster.cli.commands import command_line
from quire.cluster.cli.help import with_flags
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest, QuireError

_BAD_USAGE = (ConfigError, CheckpointError, InvalidRequest)
"""Errors that the user can fix: printed like argparse's errors, with the same exit status."""
_EXTRA = {
    "aiohttp": "aiohttp",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "ray": "ray[serve]",
    "shtab": "shtab",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
"""Packages of the extra ``cluster``, by imported module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    given = sys.argv[1:] if argv is None else argv
    # Our own messages report failed connections. gRPC reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # The first plain argument is the command: the options before it take no values.
    named = [each for each in given if not each.startswith("-")][:1]
    arguments = command_line(named).parse_args(given)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except QuireError as error:
        for note in getattr(error, "__notes__", ()):  # Remote tracebacks, places of logs.
            print(note, file=sys.stderr)
        message = str(error)
        if isinstance(error, _BAD_USAGE) and getattr(arguments, "config", "") is None:
            message = with_flags(message, arguments.flags)
        print(f"quire: {message}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_USAGE) else 1
    # The reader of the pipe, such as `head`, has closed it.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For output still to come.
        return 1
    except ModuleNotFoundError as error:
        package = _EXTRA.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        print(
            f"quire: {package} is not installed, which this command needs; pip install "
            "'quire-serve[cluster]' installs all that a cluster needs, and so does pip install "
            "'.[cluster]' in a clone of Quire's repository",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.filename is None:
            raise  # Not a user's file: a bug of ours, or of Ray's.
        print(f"quire: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
