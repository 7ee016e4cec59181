"""vLLM's flags and arguments: Quire's name for each, or why Quire does not have it.

A flag of ``vllm serve`` that Quire has under the same name is in no table. Flags that request
Quire's only behaviour have no effect. `tests/cluster/test_vllm_flags.py` has the flags of vLLM
0.33. An argument of vLLM's ``LLM`` is named like the flag, with underscores for dashes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

SPELLED: Mapping[str, str] = {
    "--port": "--http-port",
    "-q": "--quantization",
    "-dp": "--num-groups",
    "--data-parallel-size": "--num-groups",
    "-n": "--nodes-per-group",
    "--nnodes": "--nodes-per-group",
    "-asc": "--num-gateways",
    "--api-server-count": "--num-gateways",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--shutdown-timeout": "--drain-timeout-s",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
    "--uvicorn-log-level": "--log-level",
    "--disable-uvicorn-access-log": "--no-access-log",
}
"""vLLM's flag, and Quire's flag for the same setting."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--kv-cache-dtype": {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto"},
    "--model-impl": {"vllm": "quire"},
    "--log-level": {"trace": "debug", "critical": "error"},
    "--scheduling-policy": {"priority": "fcfs"},
}
"""By flag: vLLM's values with another name in Quire. Every scheduling policy has priorities."""

ALWAYS: Mapping[str, str] = {
    "--enable-auto-tool-choice": "models that can call tools may always",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-prompt-tokens-details": "usage always tells cached tokens",
    "--enable-request-id-headers": "answers always have X-Request-Id",
    "--enable-ssl-refresh": "new certificates are always taken up",
    "--disable-log-requests": "prompts are never logged",
    "--enable-log-requests": "each call is logged at its end, but its text never",
    "--enable-offline-docs": "/docs needs no network",
}
"""Flags without a value that have no effect, and why."""

_TEXT = "only text is served: no images, audio or video"
_PARALLEL = "a replica group is tensor-parallel only; --num-groups adds replica groups"
_KERNELS = "kernels are chosen by device and model"
_COMPILED = "models are not compiled; --enforce-eager turns CUDA graphs off"
_STATE = "models with recurrent layers are not served"
_SPECULATION = "speculation needs no draft model and no settings: see --speculation"
_LOADING = "safetensors and GGUF files are always memory-mapped"
_OFFLOADED = "weights are not offloaded: they stay on the device that computes"
_LOGS = "--log-level, --log-format and --no-access-log configure the logs; texts are never logged"
_WATCHED = "groups and gateways are always monitored: see --silence-timeout-s and --step-deadline-s"
_METRICS = "there are no more metrics or profiles than those at /metrics"
_CODE = "code from a model's repository or from a flag is never run"
_MOE = "experts are sharded over the ranks of a group like other weights"
_LORA = "adapters have the model's dtype and slots of --max-lora-rank"
_SLEEP = "`quire model remove` unloads a model, and --min-groups 0 unloads idle ones"
_CORS = "--allow-origin names the allowed origins; all methods and headers are allowed"
_NODES = "nodes join with `ray start`; see --ray-address and --nodes-per-group"
_ACCURACY = "kernels have one precision, which deterministic tokens need"
_SAMPLING = "each request brings its sampling parameters"
_CACHE = "all layers share one block table, and eviction goes by expected reuse"

_REFUSED_BY_REASON: Mapping[str, Iterable[str]] = {
    _TEXT: (
        *("--allowed-local-media-path", "--allowed-media-domains", "--default-mm-loras"),
        *("--diffusion-config", "--disable-chunked-mm-input", "--enable-mm-embeds"),
        *("--enable-tower-connector-lora", "--interleave-mm-strings", "--language-model-only"),
        *("--limit-mm-per-prompt", "--media-io-kwargs", "--mm-device-do-normalize"),
        *("--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"),
        *("--mm-encoder-fp8-scale-save-margin", "--mm-encoder-fp8-scale-save-path"),
        *("--mm-encoder-only", "--mm-encoder-tp-mode", "--mm-hasher-algorithm"),
        *("--mm-ipc-gpu-memory-gb", "--mm-processor-cache-gb", "--mm-processor-cache-type"),
        *("--mm-processor-device", "--mm-processor-kwargs", "--mm-shm-cache-max-object-size-mb"),
        *("--mm-tensor-ipc", "--skip-mm-profiling", "--trust-request-mm-kwargs"),
        *("--video-pruning-method", "--video-pruning-rate", "--ec-manager-config"),
        *("--ec-transfer-config", "--engram-config", "-dc"),
    ),
    _PARALLEL: (
        *("--pipeline-parallel-size", "-pp", "--prefill-context-parallel-size", "-pcp"),
        *("--decode-context-parallel-size", "-dcp", "--dcp-comm-backend", "--dcp-q-replicate"),
        *("--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size"),
        *("--data-parallel-address", "-dpa", "--data-parallel-backend", "-dpb"),
        *("--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb", "-dph"),
        *("--data-parallel-multi-port-external-lb", "-dpm", "--data-parallel-rank", "-dpn"),
        *("--data-parallel-rpc-port", "-dpp", "--data-parallel-size-local", "-dpl"),
        *("--data-parallel-start-rank", "-dpr", "--data-parallel-supervisor-port"),
        *("--disable-nccl-for-dp-synchronization", "--dp-sync-interval", "--headless"),
        *("--elastic-ep-max-dp-size", "--enable-elastic-ep", "--enable-hc-sp"),
        *("--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s"),
        *("--dp-supervisor-probe-failure-threshold", "--enable-scale-out", "--tokens-only"),
        *("--enable-batch-sharded-sampling",),
    ),
    _KERNELS: (
        *("--all2all-backend", "--attention-backend", "--attention-config", "-ac"),
        *("--disable-cascade-attn", "--disable-custom-all-reduce", "--gdn-prefill-backend"),
        *("--enable-flashinfer-autotune", "--ir-op-priority", "--kda-decode-backend"),
        *("--kda-prefill-backend", "--kernel-config", "--linear-backend", "--moe-backend"),
        *("--monokernel", "--sparse-indexer-topk-backend", "--enable-nccl-comm-suspend"),
        *("--disable-sliding-window", "--kv-sharing-fast-prefill"),
        "--enable-flash-late-interaction",
    ),
    _COMPILED: (
        *("--compilation-config", "-cc", "--cudagraph-capture-sizes", "--cudagraph-metrics"),
        *("--max-cudagraph-capture-size", "--optimization-level", "-O", "--performance-mode"),
        *("--jit-monitor-mode", "--jit-monitor-verbose", "--sleep-mode-offload-cudagraph"),
    ),
    _STATE: (
        *("--enable-mamba-cache-stochastic-rounding", "--enable-mamba-shared-prefix-checkpoint"),
        *("--mamba-backend", "--mamba-block-size", "--mamba-cache-dtype", "--mamba-cache-mode"),
        *("--mamba-cache-philox-rounds", "--mamba-ssm-cache-dtype", "--mamba-ssu-algorithm"),
        *("--replayssm-buffer-len", "--use-replayssm", "--swa-bounded-replay"),
    ),
    _SPECULATION: (
        *("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
        "--per-request-spec-decode-metrics",
    ),
    _LOADING: (
        *("--load-format", "--model-loader-extra-config", "--ignore-patterns"),
        *("--max-parallel-loading-workers", "--pt-load-map-location", "--use-tqdm-on-load"),
        *("--safetensors-load-strategy", "--safetensors-prefetch-block-size"),
        *("--safetensors-prefetch-num-threads", "--weight-transfer-config"),
    ),
    _OFFLOADED: (
        *("--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size"),
        *("--offload-num-in-group", "--offload-params", "--offload-prefetch-step"),
    ),
    _LOGS: (
        *("--aggregate-engine-logging", "--disable-log-stats", "--enable-log-deltas"),
        *("--enable-log-outputs", "--enable-logging-iteration-details"),
        *("--log-config-file", "--log-error-stack", "--logging-config"),
        *("--max-log-len", "--disable-access-log-for-endpoints"),
    ),
    _WATCHED: ("--enable-fault-tolerance", "--fault-tolerance-config", "--watchdog-config"),
    _METRICS: (
        *("--custom-histogram-buckets", "--enable-mfu-metrics"),
        *("--enable-layerwise-nvtx-tracing", "--enable-per-request-metrics"),
        *("--enable-server-load-tracking", "--kv-cache-metrics", "--kv-cache-metrics-sample"),
        *("--profiler-config", "--ray-workers-use-nsight"),
        *("--show-hidden-metrics-for-version", "--enable-trace-replay"),
    ),
    _CODE: (
        *("--io-processor-plugin", "--logits-processors", "--middleware"),
        *("--model-class-overrides", "--reasoning-parser-plugin", "--scheduler-cls"),
        *("--tool-parser-plugin", "--trust-remote-code", "--worker-cls"),
        *("--worker-extension-cls", "--code-revision"),
    ),
    _MOE: (
        *("--enable-dbo", "--dbo-decode-token-threshold", "--dbo-prefill-token-threshold"),
        *("--enable-ep-weight-filter", "--enable-eplb", "--enable-expert-parallel", "-ep"),
        *("--eplb-config", "--expert-placement-strategy", "--ubatch-size"),
        "--enable-return-routed-experts",
    ),
    _LORA: (
        *("--enable-mixed-moe-lora-format", "--enable-moe-shared-loras", "--fully-sharded-loras"),
        *("--lora-dtype", "--lora-target-modules", "--max-lora-cls-labels"),
        "--specialize-active-lora",
    ),
    _SLEEP: (
        *("--enable-sleep-mode", "--sleep-mode-backend", "--sleep-preserve-parameter-names"),
        "--enable-cumem-allocator",
    ),
    _CORS: ("--allow-credentials", "--allowed-methods", "--allowed-headers"),
    _NODES: (
        *("--distributed-executor-backend", "--distributed-timeout-seconds", "--master-addr"),
        *("--master-port", "--node-rank", "-r", "--cpu-distributed-timeout-seconds"),
        *("--numa-bind", "--numa-bind-cpus", "--numa-bind-nodes", "--device-ids"),
    ),
    _ACCURACY: ("--kv-cache-dtype-skip-layers", "--use-fp64-gumbel"),
    _SAMPLING: ("--override-generation-config", "--logprobs-mode", "--return-sampling-mask"),
    _CACHE: (
        *("--disable-hybrid-kv-cache-manager", "--prefix-cache-retention-interval"),
        *("--prefix-caching-hash-algo", "--prefix-match-unit", "--watermark"),
        "--watermark-config",
    ),
}
_REFUSED_ALONE: Mapping[str, str] = {
    "--additional-config": "every setting has a flag of its own",
    "--allow-deprecated-quantization": "quantization formats are supported or refused by name",
    "--anthropic-disabled-thinking-effort": "thinking of type disabled turns thinking off",
    "--aux-output-config": "there is no such output",
    "--collect-detailed-traces": "traces have spans of queue, prefill and decode only",
    "--chat-template-content-format": "a chat template receives content as text",
    "--cohere-format": "the format follows from the model's chat template",
    "--cohere-is-reasoning-model": "the format follows from the model's chat template",
    "--config-format": "config.json and GGUF files are recognized by their content",
    "--convert": "pooling follows from the checkpoint's own files",
    "--default-chat-template-kwargs": "requests bring chat_template_kwargs",
    "--device-memory-utilization": "spell it --gpu-memory-utilization",
    "--disable-fastapi-docs": "/docs cannot be switched off",
    "--download-dir": "set HF_HOME: downloads are kept there",
    "--enable-force-include-usage": "clients ask for it with stream_options",
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--enable-shm-tensor-arena": "steps always use shared memory",
    "--enable-tokenizer-info-endpoint": "GetTokenizer of vllm.grpc.engine returns the tokenizer",
    "--exclude-tools-when-tool-choice-none": "tools stay in the prompt, where they are cached",
    "--fail-on-environ-validation": "no setting is read from VLLM_ variables",
    "--fingerprint-mode": "system_fingerprint always names weights and numerics",
    "--fingerprint-value": "system_fingerprint always names weights and numerics",
    "--generation-config": "only end tokens are read from generation_config.json, as with 'vllm'",
    "--grpc": "gRPC is always served, at --grpc-port",
    "--hf-config-path": "config.json is read from the model's folder",
    "--hf-overrides": "edit config.json in a copy of the model's folder",
    "--hf-token": "set HF_TOKEN",
    "--https": "--tls-certificate and --tls-key serve HTTPS",
    "--kv-events-config": "--kv-events serves KV events over gRPC only (SubscribeKvEvents)",
    "--kv-offloading-backend": "--kv-offloading-size always uses Quire's own backend",
    "--kv-transfer-config": "groups discover each other: see --kv-transfer",
    "--long-prefill-token-threshold": "the prompt with the fewest tokens left is computed first",
    "--long-prefill-token-threshold-adaptive": "the prompt with the least left is computed first",
    "--max-logprobs": "at most 20 log-probabilities are returned",
    "--max-num-active-seqs": "spell it --max-num-seqs",
    "--max-num-queued-tokens": "--max-queued-bytes bounds the memory of waiting prompts",
    "--max-num-scheduled-tokens": "spell it --max-num-batched-tokens",
    "--num-gpu-blocks-override": "--kv-cache-memory-bytes sets the cache's size",
    "--pooler-config": "pooling follows from the checkpoint's own files",
    "--prefill-schedule-interval": "each step has room for prompts",
    "--quantization-config": "the quantization format is read from the checkpoint",
    "--reasoning-config": "--reasoning-parser names the format",
    "--reasoning-effort-map": "requests have reasoning_effort, which the chat template reads",
    "--renderer-num-workers": "chat templates run in a process of their own at each gateway",
    "--response-role": "answers always have the role assistant",
    "--return-tokens-as-token-ids": "requests may set return_token_ids",
    "--root-path": "paths begin at /; have the proxy strip its prefix",
    "--runner": "the task follows from the checkpoint",
    "--scheduler-reserve-full-isl": "a prompt is only admitted if all of it fits into the cache",
    "--skip-tokenizer-init": "gateways need the tokenizer",
    "--sse-keep-alive-interval": "nothing is sent between tokens to keep a stream alive",
    "--ssl-ca-certs": "clients authenticate with API keys, not with certificates",
    "--ssl-cert-reqs": "clients authenticate with API keys, not with certificates",
    "--ssl-ciphers": "the TLS library chooses the ciphers",
    "--stream-interval": "the tokens of each step are sent at once",
    "--structured-outputs-config": "llguidance is the one backend",
    "--tokenizer": "the tokenizer is the one in the model's folder: put its files there",
    "--tokenizer-mode": "the kind of tokenizer is read from its files",
    "--tokenizer-revision": "the tokenizer has the model's revision: MODEL@REVISION",
    "--tool-server": "the server runs no tools",
    "--tool-strict-level": "each tool's field strict decides",
    "--trust-request-chat-template": "requests cannot bring a chat template",
    "--uds": "gateways listen on TCP: see --host and --http-port",
}

REFUSED: Mapping[str, str] = {
    **{flag: why for why, flags in _REFUSED_BY_REASON.items() for flag in flags},
    **_REFUSED_ALONE,
}
"""Flags that Quire does not have, and why or what to use instead."""

_REFUSED_OFFLINE: Mapping[str, str] = {
    "disable_async_output_proc": "async_scheduling prepares the next step while one runs",
    "max_seq_len_to_capture": _COMPILED,
    "swap_space": "kv_offloading_size keeps evicted blocks in host memory",
    "task": "the task follows from the checkpoint",
}
"""Arguments of vLLM's ``LLM`` that are not flags of its server, and why Quire lacks them."""


def our_value(name: str, value: Any) -> Any:
    """Quire's value for vLLM's ``value`` of the argument ``name``. A ``dtype`` may be a
    `torch.dtype`."""
    written = str(value).removeprefix("torch.") if name == "dtype" else value
    return VALUES[f"--{name.replace('_', '-')}"].get(written, written)


def _argument(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


ARGUMENTS: Mapping[str, str] = {
    **{_argument(flag): f"is not served: {why}" for flag, why in REFUSED.items()},
    **{name: f"is not served: {why}" for name, why in _REFUSED_OFFLINE.items()},
    **{_argument(flag): f"can be left out: {why}" for flag, why in ALWAYS.items()},
    **{
        _argument(flag): f"is not there offline; it is {ours} of `quire serve`"
        for flag, ours in SPELLED.items()
    },
}
"""Arguments of vLLM's ``LLM`` that Quire's may lack, and the end of the error message for each."""

SAMPLING: Mapping[str, str] = {
    name: f"is not served: {why}"
    for name, why in {
        "best_of": "ask for n completions and take the best by its cumulative_logprob",
        "detokenize": "texts are always made; token_ids stand beside them",
        "extra_args": "no code that reads them is run",
        "flat_logprobs": "logprobs have one form, a dictionary for each position",
        "guided_decoding": "spell it structured_outputs=StructuredOutputsParams(…)",
        "logits_processors": "no code of a request's is run; logit_bias changes logits",
        "output_kind": "outputs are whole; a server streams them",
        "repetition_detection": "stop and max_tokens end a text",
        "skip_clone": "parameters cannot be changed, and are never copied",
        "skip_reading_prefix_cache": "what is cached changes no token",
        "spaces_between_special_tokens": "spaces are the tokenizer's",
        "use_beam_search": "there is no beam search; n draws several completions",
    }.items()
}
"""Fields of vLLM's ``SamplingParams`` that Quire's lacks."""

STRUCTURED: Mapping[str, str] = {
    name: f"is not served: {why}"
    for name, why in {
        "disable_additional_properties": 'write "additionalProperties": false into the schema',
        "disable_any_whitespace": "models write the whitespace that they were trained with",
        "disable_fallback": "llguidance is the one backend",
        "whitespace_pattern": "models write the whitespace that they were trained with",
    }.items()
}
"""Fields of vLLM's ``StructuredOutputsParams`` that Quire's lacks."""

LORA: Mapping[str, str] = {
    "base_model_name": "can be left out: the adapter is of the model that is asked",
    "load_inplace": "can be left out: an adapter is known by its content",
    "long_lora_max_len": "is not served: contexts are as long as the model's",
    "lora_local_path": "is not served: spell it lora_path",
    "tensorizer_config_dict": "is not served: safetensors files are read",
}
"""Fields of vLLM's ``LoRARequest`` that Quire's lacks."""
