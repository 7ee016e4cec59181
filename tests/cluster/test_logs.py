import io
import logging
from collections.abc import Iterator

import pytest

from quire.cluster.deploy.logs import log_beside_serve
from quire.cluster.settings import config_from


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Output of Serve's logger, set up as in a replica: warnings and above."""
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("quire")
    kept = [(each, each.handlers, each.level, each.propagate) for each in (serve, ours)]
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s ReplicaGroup %(message)s"))
    serve.handlers = [handler]
    serve.setLevel(logging.WARNING)
    yield text
    for logger, handlers, level, propagate in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_what_a_replica_says_is_written_once_with_time_and_origin(written: io.StringIO) -> None:
    log_beside_serve(config_from({}))
    (writer,) = logging.getLogger("quire").handlers
    logging.getLogger("quire.cluster.group.server").info("group a serves")
    writer.close()
    lines = written.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("INFO 20")
    assert lines[0].endswith(" ReplicaGroup group a serves")
    logging.getLogger("ray.serve").info("of Serve's own, warnings are enough")
    assert len(written.getvalue().splitlines()) == 1
