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

_TEXT = "models are served as text models: there are no images, audio or video"
_PARALLEL = "the ranks of a group are tensor-parallel; --num-groups runs more groups"
_KERNELS = "kernels follow from the device and the model, and cannot be chosen"
_COMPILED = "models are not compiled; --enforce-eager leaves CUDA graphs out"
_STATE = "models with recurrent layers are not served"
_GUESSES = "guesses need no model and no settings: see --speculation"
_LOADING = "safetensors and GGUF files are mapped as they are"
_OFFLOADED = "weights stay where they are computed with"
_LOGS = "logs have --log-level, --log-format and --no-access-log, and no text of requests"
_WATCHED = "groups and gateways are always watched: see --silence-timeout-s and --step-deadline-s"
_METRICS = "/metrics has all that there is"
_CODE = "no code that comes with a model, or is named by a flag, is run"
_MOE = "experts are shared out among the ranks of a group as other weights are"
_LORA = "adapters are kept in the model's type, in slots of --max-lora-rank"
_SLEEP = "a model is put away by `quire model remove`, and by --min-groups 0"
_CORS = "--allow-origin names the pages that may call; they may use all methods and headers"
_NODES = "nodes join by `ray start`; --ray-address auto and --nodes-per-group use them"
_ACCURACY = "the kernels have one accuracy, on which the promise of equal tokens rests"
_SAMPLING = "requests have their sampling parameters themselves"
_CACHE = "blocks of all layers are kept alike, by what they are worth"

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
    _GUESSES: (
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
    "--additional-config": "there is none: each setting has a flag",
    "--allow-deprecated-quantization": "kinds of quantised weights are read or refused by name",
    "--anthropic-disabled-thinking-effort": "thinking of type disabled means no thinking",
    "--aux-output-config": "there is no such output",
    "--collect-detailed-traces": "spans tell of queue, prefill and decode, and of no modules",
    "--chat-template-content-format": "a chat's content reaches its template as text",
    "--cohere-format": "the format follows from the model's chat template",
    "--cohere-is-reasoning-model": "the format follows from the model's chat template",
    "--config-format": "config.json and GGUF files are told apart by what they are",
    "--convert": "pooling follows from the checkpoint's own files",
    "--default-chat-template-kwargs": "requests have chat_template_kwargs themselves",
    "--device-memory-utilization": "spell it --gpu-memory-utilization",
    "--disable-fastapi-docs": "/docs cannot be switched off",
    "--download-dir": "set HF_HOME, where files of the hub are kept",
    "--enable-force-include-usage": "clients ask for it with stream_options",
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--enable-shm-tensor-arena": "steps always lie in shared memory",
    "--enable-tokenizer-info-endpoint": "the tokenizer is GetTokenizer's of vllm.grpc.engine",
    "--exclude-tools-when-tool-choice-none": "tools stay in the prompt, where they are cached",
    "--fail-on-environ-validation": "no setting is read from VLLM_ variables",
    "--fingerprint-mode": "system_fingerprint always names weights and numerics",
    "--fingerprint-value": "system_fingerprint always names weights and numerics",
    "--generation-config": "generation_config.json decides ends of texts alone, as with 'vllm'",
    "--grpc": "gRPC is always served, at --grpc-port",
    "--hf-config-path": "config.json is read from the model's folder",
    "--hf-overrides": "edit config.json in a copy of the model's folder",
    "--hf-token": "set HF_TOKEN",
    "--https": "--tls-certificate and --tls-key serve HTTPS",
    "--kv-events-config": "--kv-events has them told over gRPC (SubscribeKvEvents); not over ZMQ",
    "--kv-offloading-backend": "--kv-offloading-size has one of its own",
    "--kv-transfer-config": "groups find each other: see --kv-transfer",
    "--long-prefill-token-threshold": "the prompt with the least left to compute goes first",
    "--long-prefill-token-threshold-adaptive": "the prompt with the least left goes first",
    "--max-logprobs": "20 log-probabilities are the most",
    "--max-num-active-seqs": "spell it --max-num-seqs",
    "--max-num-queued-tokens": "--max-queued-bytes bounds the memory of waiting prompts",
    "--max-num-scheduled-tokens": "spell it --max-num-batched-tokens",
    "--num-gpu-blocks-override": "--kv-cache-memory-bytes sets the cache's size",
    "--pooler-config": "pooling follows from the checkpoint's own files",
    "--prefill-schedule-interval": "each step has room for prompts",
    "--quantization-config": "the kind of quantised weights is read from the checkpoint",
    "--reasoning-config": "--reasoning-parser names the format",
    "--reasoning-effort-map": "requests have reasoning_effort, which the chat template reads",
    "--renderer-num-workers": "chat templates run in a process of their own at each gateway",
    "--response-role": "answers have the role of the assistant",
    "--return-tokens-as-token-ids": "requests have return_token_ids",
    "--root-path": "paths begin at /; have the proxy strip its prefix",
    "--runner": "what a model does follows from its checkpoint",
    "--scheduler-reserve-full-isl": "a prompt is let in where all of it finds room, always",
    "--skip-tokenizer-init": "gateways need the tokenizer",
    "--sse-keep-alive-interval": "streams are kept alive by the connection's own means",
    "--ssl-ca-certs": "clients show API keys, and no certificates",
    "--ssl-cert-reqs": "clients show API keys, and no certificates",
    "--ssl-ciphers": "ciphers are the TLS library's own choice",
    "--stream-interval": "each step's tokens go out at once",
    "--structured-outputs-config": "constraints have one backend, llguidance",
    "--tokenizer": "the tokenizer is the one in the model's folder: put its files there",
    "--tokenizer-mode": "the tokenizer's kind is read from its files",
    "--tokenizer-revision": "the tokenizer is of the model's own revision: MODEL@REVISION",
    "--tool-server": "tools of servers are not run",
    "--tool-strict-level": "a tool's own field strict decides",
    "--trust-request-chat-template": "requests bring no chat template",
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
    "task": "what a model does follows from its checkpoint",
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
        "disable_fallback": "constraints have one backend, llguidance",
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
