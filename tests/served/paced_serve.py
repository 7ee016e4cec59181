"""``python -m tests.served.paced_serve``: Quire's command line with groups of `paced_group`."""

from tests.served.paced_group import ReplicaGroup

from quire.cluster.cli.main import main
from quire.cluster.deploy import deployments

if __name__ == "__main__":
    deployments.ReplicaGroup = ReplicaGroup  # type: ignore[misc]
    raise SystemExit(main())
