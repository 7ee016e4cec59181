"""``python -m tests.served.paced_serve``: the command line, with groups that take their time."""

from tests.served.paced_group import ReplicaGroup

from quire.cluster.cli.main import main
from quire.cluster.deploy import deployments

if __name__ == "__main__":
    deployments.ReplicaGroup = ReplicaGroup  # type: ignore[misc]
    raise SystemExit(main())
