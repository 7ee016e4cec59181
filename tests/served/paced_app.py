"""Application builders for a Serve configuration file: Quire's, with groups of `paced_group`."""

from functools import partial
from typing import Any
from unittest.mock import patch

from ray import serve
from tests.served.paced_group import ReplicaGroup

from quire.cluster.deploy import app
from quire.cluster.deploy.build import build_groups


def groups(settings: dict[str, Any]) -> "serve.Application":
    with patch.object(app, "build_groups", partial(build_groups, group=ReplicaGroup)):
        return app.groups(settings)
