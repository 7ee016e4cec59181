"""Fetches the definitions (CRDs) of third-party Kubernetes kinds that the chart uses: ``python -m
tools.definitions``. Tests of the chart check against them if they are present; none is part of this
repository.
"""

from pathlib import PurePosixPath
from urllib.request import urlopen

from tools.strangers import CACHE

FOLDER = CACHE / "crds"
_HOST = "https://raw.githubusercontent.com"
_GATEWAY_API = "kubernetes-sigs/gateway-api/v1.6.1/config/crd/standard"
_PROMETHEUS = "prometheus-operator/prometheus-operator/v0.93.0/example/prometheus-operator-crd"
FILES = (
    "ray-project/kuberay/v1.7.0/ray-operator/config/crd/bases/ray.io_rayservices.yaml",
    f"{_GATEWAY_API}/gateway.networking.k8s.io_httproutes.yaml",
    f"{_GATEWAY_API}/gateway.networking.k8s.io_grpcroutes.yaml",
    f"{_PROMETHEUS}/monitoring.coreos.com_podmonitors.yaml",
    f"{_PROMETHEUS}/monitoring.coreos.com_servicemonitors.yaml",
    f"{_PROMETHEUS}/monitoring.coreos.com_prometheusrules.yaml",
)
"""Repository, tag and path of each file."""


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        with urlopen(f"{_HOST}/{file}", timeout=60) as answer:
            (FOLDER / PurePosixPath(file).name).write_bytes(answer.read())
    print(FOLDER)


if __name__ == "__main__":
    main()
