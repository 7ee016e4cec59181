"""How far features reach into the code around them. Every figure here may only fall.

A feature lives in a folder of its own: `features/NAME` in the cluster and the router, `parts/NAME`
in the worker. A test fails when a figure rises, and when it falls: write the new figure here.
"""

import ast
import re

import pytest
from tests.modules import MODULES, ROOT, TREES, closure, imported_at_start, imported_ever, imports

NAMED_IN = {
    # feature: (its words, files of cluster and router, files of worker and kernels)
    "adapters": (r"\badapter|lora|LoRA|Lora", 39, 38),
    "kv_exchange": (
        r"[Ll]end|[Bb]orrow|kv_transfer|[Pp]ull|\bloan|PeerSource|\bsource\b.*group|[Ff]etched",
        38,
        23,
    ),
    "tracing": (r"traceparent|(?<!body\.)(?<!def )[Ss]pan[s_A-Z]|tracestate|otlp|TracesTo", 17, 2),
    "tenants": (r"\btenant", 43, 14),
    "embeddings": (r"[Ee]mbed(ding|_|s\b|ded)|\btask\b *[=:]|\"embed\"", 28, 55),
    "live": (r"\b[Ll]ive\b|live_rows|ui_api|on_finished", 7, 1),
    "kv_events": (r"SubscribeKvEvents|kv_events|KvEvents|[Ll]edger|contents_", 8, 3),
    "isolation": (r"[Ii]solat|[Bb]lame|convict|[Qq]uarantin", 11, 1),
    "priority": (r"\bpriority", 16, 9),
    "prefill_groups": (r"prefill_groups|only_prefills|hand_over|Stages|HandedOver", 10, 0),
}
"""A feature's words, and how many files outside its folder name one of them."""

KNOW_RAY = 20
"""Modules that import Ray."""
KNOW_PROTOBUF = 48
"""Modules that import protobuf or the stubs made of `proto/`, without these stubs."""
GATEWAY = "quire.cluster.deploy.gateway_server"
GATEWAY_IMPORTS = 256
"""Modules of Quire that a gateway's process imports when it starts."""
ENGINE_IN_GATEWAY = 36
"""Those of them that are parts of an engine."""
LONG_SIGNATURES = 8
"""Functions of cluster and router with eight or more parameters."""
CALLBACKS = 116
"""Parameters of functions of cluster and router that are functions."""

FEATURE = re.compile(r"\.(?:features|parts)\.(\w+)")
LISTS_FEATURES = {"quire.cluster.features.installed", "quire.worker.group_engine"}
"""The modules that may import every feature: each is the list of those that are installed."""
ENTRY_POINTS = {"quire.cluster.deploy.gateway_server"}
"""The modules that may import the list of the cluster's features."""
CORE_IMPORTS_FEATURES = {
    "adapters": (
        "deploy.build deploy.deployments deploy.gateway_server deploy.served_model "
        "edge.admin_grpc gateway.models gateway.prepare group.server group.service "
        "group.session links.groups quire.llm quire.worker.rank.runner"
    ),
    "autoscale": "config deploy.deployments deploy.serve_options links.groups",
    "embeddings": "edge.grpc_server features.vllm_grpc.servicer",
    "explain": "deploy.deployments edge.grpc_format gateway.models",
    "guard": "config deploy.build deploy.gateway_server edge.grpc_messages edge.grpc_server",
    "kv_events": "features.vllm_grpc.servicer group.service",
    "kv_exchange": "group.server group.service links.groups",
    "live": "gateway.models",
    "nodes": "deploy.build group.server",
    "template_reading": "dialects.dialect",
    "tenants": "deploy.kept_keys edge.auth gateway.models gateway.prepare serving.admission",
    "tiers": (
        "deploy.build features.kv_exchange.borrowing features.kv_exchange.lending "
        "group.engine_loop group.server"
    ),
    "tracing": (
        "config deploy.build deploy.gateway_server edge.call_records gateway.models "
        "group.output_buffer group.server group.session telemetry.timeline"
    ),
    "watcher": "deploy.deployments",
}
"""For each feature the modules outside it that still import it, without `quire.cluster.`; a later
step cuts each."""


TOOL = re.compile(r"quire\.(simulate|cluster\.tools|worker\.bench)\b")
"""Clients of a server and what works without one. `quire.cluster.cli.commands` names their commands
as text."""


def feature_of(module: str) -> str | None:
    found = FEATURE.search(module)
    return found[1] if found and module not in LISTS_FEATURES else None


@pytest.mark.parametrize("feature", NAMED_IN)
def test_few_files_outside_a_features_folder_name_it(feature: str) -> None:
    words, of_cluster, of_worker = NAMED_IN[feature]
    named = [
        path.relative_to(ROOT).parts[0]
        for name, path in MODULES.items()
        if feature_of(name) != feature
        and name not in LISTS_FEATURES
        and re.search(words, path.read_text())
    ]
    assert named.count("cluster") + named.count("router") == of_cluster
    assert named.count("worker") + named.count("kernels") == of_worker


def test_the_core_imports_no_feature() -> None:
    found: dict[str, set[str]] = {}
    for name, imported in imported_ever().items():
        for feature in map(feature_of, imported):
            if feature and feature != feature_of(name) and name not in LISTS_FEATURES:
                found.setdefault(feature, set()).add(name.removeprefix("quire.cluster."))
    assert found == {name: set(known.split()) for name, known in CORE_IMPORTS_FEATURES.items()}


def test_only_entry_points_import_the_list_of_features() -> None:
    installed = "quire.cluster.features.installed"
    found = {name for name, imported in imported_ever().items() if installed in imported}
    assert found == ENTRY_POINTS


def test_the_core_imports_no_tool() -> None:
    found = {
        (name, each)
        for name, imported in imported_ever().items()
        if not TOOL.match(name)
        for each in imported
        if TOOL.match(each)
    }
    assert not found


def test_few_modules_know_ray_and_protobuf() -> None:
    used = {name: set(imports(tree, everywhere=True)) for name, tree in TREES.items()}
    of_ray = [
        name
        for name, imported in used.items()
        if any(each.split(".")[0] == "ray" for each in imported)
    ]
    stubs = ("quire.v1.", "google.protobuf", "vllm.")
    of_protobuf = [
        name
        for name, imported in used.items()
        if not name.startswith("quire.v1.") and any(each.startswith(stubs) for each in imported)
    ]
    assert len(of_ray) == KNOW_RAY, sorted(of_ray)
    assert len(of_protobuf) == KNOW_PROTOBUF, sorted(of_protobuf)


def test_a_gateway_imports_little() -> None:
    found = closure([GATEWAY], imported_at_start())
    engine = re.compile(r"quire\.worker\.(engine|model|weights|parts|rank|step|cache)\b")
    assert len(found) == GATEWAY_IMPORTS
    assert len([name for name in found if engine.match(name)]) == ENGINE_IN_GATEWAY


def test_few_signatures_have_many_parameters() -> None:
    long, callbacks = [], 0
    for name, tree in TREES.items():
        if not name.startswith(("quire.cluster.", "quire.router.")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.args, *node.args.kwonlyargs]
                callbacks += sum(
                    each.annotation is not None and "Callable" in ast.unparse(each.annotation)
                    for each in given
                )
                of_caller = [each for each in given if each.arg not in ("self", "cls")]
                if len(of_caller) >= 8:
                    long.append(f"{name}.{node.name}")
    assert len(long) == LONG_SIGNATURES, sorted(long)
    assert callbacks == CALLBACKS
