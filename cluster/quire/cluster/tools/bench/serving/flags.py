"""The flags of ``quire bench serve``, spelled as those of ``vllm bench serve``."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.cli.help import DefaultsFormatter, Parser, finite
from quire.cluster.unique_keys import read_json

if TYPE_CHECKING:
    from quire.cluster.tools.bench.serving.config import ServeBench

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_ENDPOINTS = {"openai": _COMPLETIONS, "vllm": _COMPLETIONS, "openai-chat": _CHAT}
_DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "trace")
_HOW = """\
How it counts. Requests are sent at their times however slow answers are, unless --max-concurrency
holds them back in the client. TTFT is from sending a request (with the set-up of a connection, if
none is free) to its first chunk with a token; E2EL to its last chunk; TPOT is (E2EL - TTFT) /
(tokens - 1). Tokens are those of the server's usage. A chunk of several tokens counts as such in
ITL: each has an equal share of the gap before it. To know them, usage is asked for in every chunk
(stream_options.continuous_usage_stats); where the server does not tell, a chunk is one token, and
the report says so. Requests that fail count in no figure but their number. The report tells how
late the client itself was: a client that is late measures itself."""


def add_bench_serve_parser(kinds: "argparse._SubParsersAction[Parser]") -> None:
    """Adds ``serve`` to ``bench``."""
    parser = kinds.add_parser(
        "serve",
        usage="%(prog)s [flags]",
        help="load any server that speaks OpenAI's API, and report what its clients see",
        description="Loads any server that speaks OpenAI's API, and reports what its clients see: "
        "times to the first token and between tokens, throughput, cached tokens, errors. Flags and "
        f"names of the result are those of `vllm bench serve`. {_HOW}",
        formatter_class=DefaultsFormatter,
    )
    _add_target(parser.add_argument_group("server").add_argument)
    _add_dataset(parser.add_argument_group("prompts").add_argument)
    _add_traffic(parser.add_argument_group("traffic").add_argument)
    _add_result(parser.add_argument_group("result").add_argument)
    parser.set_defaults(run=_run)


def _add_target(add: Callable[..., Any]) -> None:
    add(
        "--base-url", metavar="URL", help="URL of the server, with or without /v1; overrides --host"
    )
    add("--host", default="127.0.0.1", help="host of the server")
    add("--port", type=int, default=8000, help="port of the server")
    add(
        "--endpoint",
        metavar="PATH",
        help=f"{_COMPLETIONS} or {_CHAT}; that of --backend if absent",
    )
    add(
        "--backend",
        choices=tuple(_ENDPOINTS),
        default="openai",
        help="kind of requests: openai and vllm for completions, openai-chat for chats",
    )
    add("--model", help="name of the model; the first of /v1/models if absent")
    add(
        "--api-key",
        help="API key for the server; if absent, the variable QUIRE_API_KEY or OPENAI_API_KEY",
    )
    add("--header", nargs="+", type=_pair, metavar="NAME=VALUE", help="more headers")
    add("--insecure", action="store_true", help="accept any TLS certificate")
    add("--timeout-s", type=finite, default=3600.0, help="time limit of one request")
    add("--ignore-eos", action="store_true", help="let answers continue after the end token")
    add("--temperature", type=finite, default=0.0, help="0 takes the likeliest token")
    add("--extra-body", type=_object, metavar="JSON", help="more fields of requests")


def _add_dataset(add: Callable[..., Any]) -> None:
    add(
        "--dataset-name",
        choices=_DATASETS,
        default="random",
        help="random: lengths around a mean; prefix_repetition: a few prefixes, shared; "
        "sharegpt: first messages of its JSON file; custom: one request a line, with prompt (text "
        "or token ids), messages or prompt_token_ids, and output_tokens if you like; trace: made "
        "up to share blocks as those of a trace do, at its times",
    )
    add("--dataset-path", type=Path, help="the file of sharegpt, custom or trace")
    add("--num-prompts", type=int, default=1000, help="requests, or as many as a file has")
    add("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals")
    add(
        "--tokenizer",
        help="folder, file or name on the hub: which token ids there are, and the length of "
        "texts; without, ids are below 4,000 and a token is four characters",
    )
    add("--random-input-len", type=int, default=1024, help="mean tokens of a prompt")
    add("--random-output-len", type=int, default=128, help="mean output tokens")
    add(
        "--random-range-ratio",
        type=finite,
        default=0.0,
        help="how far lengths are from the mean: 0.5 is from half of it to one and a half",
    )
    add("--random-prefix-len", type=int, default=0, help="tokens of a common prefix before it")
    add("--prefix-repetition-prefix-len", type=int, default=256, help="tokens of each prefix")
    add(
        "--prefix-repetition-suffix-len",
        type=int,
        default=256,
        help="tokens of each request after the prefix",
    )
    add("--prefix-repetition-num-prefixes", type=int, default=10, help="different prefixes")
    add("--prefix-repetition-output-len", type=int, default=128, help="output tokens")
    add(
        "--sharegpt-output-len",
        type=int,
        help="output tokens; those of the file's answer if absent",
    )
    add(
        "--custom-output-len",
        type=int,
        help="output tokens, instead of each line's; 256 if neither is given",
    )
    add(
        "--trace-format",
        choices=("mooncake", "azure", "log"),
        help="format of the trace; if absent, mooncake for .jsonl and azure for .csv",
    )
    add("--trace-speed", type=finite, default=1.0, help="2 sends a trace twice as fast")


def _add_traffic(add: Callable[..., Any]) -> None:
    add(
        "--request-rate",
        type=float,
        help="requests per second, or inf for all at once; if absent, a trace's times, else inf",
    )
    add(
        "--burstiness",
        type=finite,
        default=1.0,
        help="with a rate: 1 is a Poisson process, less is burstier, more is more regular",
    )
    add("--max-concurrency", type=int, help="most requests at a time; no limit if absent")
    add("--num-warmups", type=int, default=0, help="requests sent before the measurement")


def _add_result(add: Callable[..., Any]) -> None:
    add(
        "--goodput",
        nargs="+",
        type=_objective,
        metavar="NAME:MS",
        help="count requests that are within ttft:MS, tpot:MS and e2el:MS",
    )
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="figures to show, of ttft, tpot, itl, e2el and client_queue_time",
    )
    add(
        "--metric-percentiles", default="99", metavar="N,…", help="percentiles to show, with commas"
    )
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="include figures and texts of each request")
    add("--result-dir", type=Path, default=Path(), help="folder of the JSON file")
    add("--result-filename", help="name of the JSON file; made of rate, model and time if absent")
    add("--disable-tqdm", action="store_true", help="show no progress in the terminal")
    add("--label", help="a name for the run, in the result")
    add("--metadata", nargs="+", type=_pair, metavar="KEY=VALUE", help="extra values in the result")


def bench_of(arguments: argparse.Namespace) -> "ServeBench":
    """The benchmark's configuration from the flags.

    Raises:
        ConfigError: A value is out of its range.
    """
    from quire.cluster.tools.bench.serving.config import Dataset, ServeBench, Target, Traffic

    lens = {"sharegpt": arguments.sharegpt_output_len, "custom": arguments.custom_output_len}
    own = {
        name: getattr(arguments, name)
        for name in vars(arguments)
        if name.startswith(("random_", "prefix_repetition_", "trace_"))
    }
    key = arguments.api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    body: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.ignore_eos:
        body["ignore_eos"] = True
    return ServeBench(
        target=Target(
            base_url=arguments.base_url or f"http://{host}:{arguments.port}",
            endpoint=arguments.endpoint or _ENDPOINTS[arguments.backend],
            model=arguments.model,
            api_key=key,
            headers=dict(arguments.header or ()),
            insecure=arguments.insecure,
            timeout_s=arguments.timeout_s,
            body=body | (arguments.extra_body or {}),
        ),
        dataset=Dataset(
            name=arguments.dataset_name,
            path=arguments.dataset_path,
            num_prompts=arguments.num_prompts,
            seed=arguments.seed,
            output_len=lens.get(arguments.dataset_name),
            **own,
        ),
        traffic=Traffic(
            request_rate=_rate(arguments),
            burstiness=arguments.burstiness,
            max_concurrency=arguments.max_concurrency,
            num_warmups=arguments.num_warmups,
        ),
        tokenizer=arguments.tokenizer,
        metrics=tuple(_listed(arguments.percentile_metrics)),
        percentiles=tuple(_percentiles(arguments.metric_percentiles)),
        goodput=dict(arguments.goodput or ()),
        label=arguments.label,
        metadata=dict(arguments.metadata or ()),
        shows_progress=not arguments.disable_tqdm,
        save_result=arguments.save_result or arguments.save_detailed,
        save_detailed=arguments.save_detailed,
        result_dir=arguments.result_dir,
        result_filename=arguments.result_filename,
    )


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.tools.bench.serving.command import bench_serve

    return bench_serve(bench_of(arguments))


def _rate(arguments: argparse.Namespace) -> float | None:
    if arguments.request_rate is None and arguments.dataset_name != "trace":
        return float("inf")
    rate: float | None = arguments.request_rate
    return rate


def _listed(text: str) -> Sequence[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _percentiles(text: str) -> Sequence[float]:
    from quire.worker.request.errors import ConfigError

    try:
        return [float(each) for each in _listed(text)]
    except ValueError:
        raise ConfigError(
            f"metric_percentiles={text}: must be numbers with commas, such as 50,99"
        ) from None


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name.strip() or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    return name.strip(), value.strip()


def _objective(text: str) -> tuple[str, float]:
    name, separator, value = text.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME:MS, such as ttft:500")
    most_ms = finite(value)
    if most_ms < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be 0 ms or more")
    return name, most_ms


def _object(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return value
