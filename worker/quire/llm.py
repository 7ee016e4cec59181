"""The offline API: runs a model in this process on batches of prompts.

    from quire import LLM, SamplingParams

    with LLM(model="path/to/checkpoint", tensor_parallel_size=2) as llm:
        for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32)):
            print(output.outputs[0].text)

Names and meanings are vLLM's. Every prompt of a batch is checked before the first one runs; if one
is invalid, none runs.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.kernels.quantization import KvCacheDType, Quantization
from quire.worker.group_engine import GroupEngine
from quire.worker.model.hub import fetch_adapter, fetch_checkpoint, with_revision
from quire.worker.model.sentence_folder import read_scoring, read_use
from quire.worker.parts.adapters.reading import checker
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.rank.executor import make_executor
from quire.worker.request.adapters import LoRARequest
from quire.worker.request.arguments import explains_arguments
from quire.worker.request.config import Device, DType, EngineConfig, ModelImpl, SchedulingPolicy
from quire.worker.request.errors import AdapterError, CheckpointError, ConfigError, InvalidRequest
from quire.worker.request.limits import derive_seed
from quire.worker.request.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.worker.request.request import Prepared, Task
from quire.worker.request.sampling_params import SamplingParams, params_of_each
from quire.worker.request.scoring import LogitScore, PairScore, Scoring
from quire.worker.request.spelling import spell_out
from quire.worker.request.structured import StructuredOutputsParams
from quire.worker.request.vectors import similarity
from quire.worker.request.vllm_names import ARGUMENTS, our_value
from quire.worker.text.completions import OfflineCompletion, Progress, request_output
from quire.worker.text.embeddings import OfflineEmbedding, pair_token_ids
from quire.worker.text.prompts import Prompt, read_prompt
from quire.worker.text.reasoning import reasoning_of
from quire.worker.text.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from quire.worker.text.template.process import TemplateProcess

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each prompt (``None``: no adapter)."""


@explains_arguments(ARGUMENTS)
class LLM:
    """A model and its engine. Use it as a context manager, or call `close`.

    Args:
        model: A checkpoint directory in Hugging Face format (safetensors; `docs/models.md`), a GGUF
            file, or ``ORG/NAME`` of the Hugging Face hub, which is fetched into its cache
            (``ORG/NAME/FILE.gguf`` where a repository has several GGUF files).
        revision: A branch, tag or commit of a model of the hub; its main branch by default.
        model_impl: "quire" runs the model families that `docs/models.md` lists, "transformers" any
            decoder with that library's modules; "auto" takes "quire" for any model it can run.
        tensor_parallel_size: Ranks that share each layer; above 1, each is its own process.
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        quantization: "int8" multiplies in 8 bits: weights have a scale per output, activations
            one per token. "w4" keeps weights in 4 bits with a scale for each 32, and the LM
            head in "int8". Both run on CPUs only. ``None`` quantizes nothing.
        kv_cache_dtype: "auto" stores K and V in the type they are computed in; "int8" (CPU) in 8
            bits, with a scale for each token and head; "fp8" (GPU) in 8 bits, 4 significant.
        seed: A request without a seed gets one derived from this and its number; ``None`` is 0.
        gpu_memory_utilization: On a GPU the share of its memory for weights, activations and KV
            (default 0.9); on a CPU the share of the free RAM for KV (default 0.4, but at most
            4 GiB).
        kv_cache_memory_bytes: Size of the KV cache in bytes, instead of a share.
        block_size: Tokens in a block of KV cache: 4, 8, 16, 32, 64 or 128.
        max_model_len: Longest prompt + output, in tokens; the checkpoint's own limit by default.
        enable_lora: Accept a ``lora_request`` with prompts.
        max_loras: Different adapters in one step; if requests use more, the adapters take turns.
        max_lora_rank: The greatest rank that an adapter may have.
        max_cpu_loras: Adapters kept ready in host memory; four times ``max_loras`` by default.
        max_num_seqs: Most sequences that run at the same time.
        max_num_batched_tokens: Most tokens that one step computes.
        enable_prefix_caching: Reuse the KV of prompts with a common prefix.
        kv_offloading_size: GiB of host memory for blocks that the KV cache evicts.
        kv_disk_dir: A folder on a local disk for blocks of KV. A later `LLM` of the same model can
            reuse them.
        kv_disk_size: Most GiB of blocks in ``kv_disk_dir``.
        device: "auto", "cpu" or "cuda".
        enforce_eager: On a GPU, run decodes without CUDA graphs.
        deterministic: On a GPU, make a row's bits independent of the rest of the batch.
        num_threads: CPU threads of each rank; by default, the ranks share the machine's cores.
        async_scheduling: Prepare the next step while one runs. On by default on a GPU.
        speculation: Draft tokens without a model and verify them in the next step when few
            sequences run. Outputs do not change. On by default on a CPU.
        scheduling_policy: "shortest_prefill" computes the prompt with the fewest remaining tokens
            first, "fcfs" the one that arrived first.

    Raises:
        ConfigError: A setting cannot work; the message names it and a valid value.
        UnknownArgument: `LLM` has no such argument. The message says what to use instead, also for
            arguments of vLLM's ``LLM``.
        CheckpointError: The model's files are missing, damaged or of an unsupported kind, or the
            hub does not provide them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        model_impl: ModelImpl = "auto",
        tensor_parallel_size: int = 1,
        dtype: DType = "auto",
        quantization: Quantization | None = None,
        kv_cache_dtype: KvCacheDType = "auto",
        seed: int | None = 0,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        device: Device = "auto",
        enforce_eager: bool = False,
        deterministic: bool = True,
        num_threads: int | None = None,
        async_scheduling: bool | None = None,
        speculation: bool | None = None,
        scheduling_policy: SchedulingPolicy = "shortest_prefill",
        enable_lora: bool = False,
        max_loras: int = 8,
        max_lora_rank: int = 64,
        max_cpu_loras: int | None = None,
        kv_offloading_size: float = 0.0,
        kv_disk_dir: str | Path | None = None,
        kv_disk_size: float = 16.0,
    ) -> None:
        self.config = EngineConfig(
            model=fetch_checkpoint(with_revision(_path(model), revision)),
            model_impl=our_value("model_impl", model_impl),
            tensor_parallel_size=tensor_parallel_size,
            dtype=our_value("dtype", dtype),
            quantization=quantization,
            kv_cache_dtype=our_value("kv_cache_dtype", kv_cache_dtype),
            seed=0 if seed is None else seed,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            device=device,
            enforce_eager=enforce_eager,
            deterministic=deterministic,
            num_threads=num_threads,
            async_scheduling=async_scheduling,
            speculation=speculation,
            scheduling_policy=our_value("scheduling_policy", scheduling_policy),
            enable_lora=enable_lora,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            max_cpu_loras=max_cpu_loras,
            kv_offloading_size=kv_offloading_size,
            kv_disk_dir=cast("Path | None", kv_disk_dir),  # It makes a path of it.
            kv_disk_size=kv_disk_size,
        )
        self._tokenizer = _load_tokenizer(self.config.model)
        self._scoring = read_scoring(self.config.model)
        self._use = read_use(self.config.model)
        executor, facts = make_executor(self.config)
        self._engine = GroupEngine(self.config, facts, executor)
        self._adapters = AdapterStore(check=checker(self.config))
        self._num_prompts = 0
        self._templates: TemplateProcess | None = None
        # Ranks must not outlive an LLM that nobody closed.
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def engine(self) -> GroupEngine:
        """The engine that runs this model. It has statistics and block events."""
        return self._engine

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: The checkpoint has no tokenizer. Its prompts must be token ids.
        """
        return self._tokenizer or Tokenizer.load(self.config.model)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes ``prompts`` as one batch. Returns the outputs in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            sampling_params: One object for all prompts, or one for each.
            use_tqdm: Show progress on stderr: tokens per second and cache hits.
            lora_request: The adapter for all prompts, or a list with one for each; ``None`` is
                the base model.
            priority: A number for each prompt. Lower numbers run first; the default is 0.

        Raises:
            InvalidRequest: A prompt cannot be served; the message says which. No prompt was run.
        """
        # The check of each prompt refuses values of a wrong type, such as a number.
        listed = list(prompts) if isinstance(prompts, list | tuple) else [cast("Prompt", prompts)]
        all_params = params_of_each(sampling_params, num_prompts=len(listed))
        priorities = [0] * len(listed) if priority is None else list(priority)
        if len(priorities) != len(listed):
            raise InvalidRequest(
                f"{len(priorities)} priorities for {len(listed)} prompts: give one for each, or "
                "leave it out"
            )
        adapters = self._digests(lora_request, num_prompts=len(listed))
        batch = [
            self._completions(index, *one)
            for index, one in enumerate(zip(listed, all_params, priorities, adapters, strict=True))
        ]
        self._run([completion for group in batch for completion in group], shown=use_tqdm)
        return [request_output(completions) for completions in batch]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one chat or several, rendered with the model's chat template.

        ``tools`` lists the tools that the model may call, as in OpenAI's API; its calls stay text.
        ``continue_final_message`` makes the model continue the last message.
        ``chat_template_kwargs`` are extra template variables, such as ``enable_thinking``. The
        template is rendered in a process of its own, with limits on time and memory.
        """
        one_chat = bool(messages) and isinstance(messages[0], Mapping)
        chats = cast("Sequence[Sequence[Message]]", [messages] if one_chat else messages)
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": chat_template_kwargs,
        }
        prompts = [{"prompt_token_ids": self._rendered(chat, options)} for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def _rendered(self, chat: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat. Raises InvalidRequest, as `ChatTemplate.render` does."""
        tokenizer = self.get_tokenizer()
        if tokenizer.template is None or not chat:
            return tokenizer.apply_chat_template(chat, **options)  # Which refuses them.
        if self._templates is None:
            from quire.worker.text.template.process import (
                TemplateProcess,  # Jinja is slow.
            )

            self._templates = TemplateProcess(tokenizer.template)
        text = self._templates.render(chat, **options)
        return tokenizer.encode(text, add_special_tokens=False)  # The template has written them.

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Computes the embeddings of ``prompts`` as the checkpoint's ``modules.json`` describes.

        Args:
            prompts: One prompt or a list of them.
            truncate_prompt_tokens: Keep at most this many tokens from the start of a prompt; -1
                keeps as many as the model takes. By default a prompt that is too long is refused.
            use_tqdm: Show progress on stderr.
            lora_request: As for `generate`.

        Raises:
            InvalidRequest: The model makes no embeddings, or a prompt cannot be served; the message
                says which. No prompt was run.
        """
        if isinstance(self._scoring, PairScore):
            raise InvalidRequest(
                "this model scores pairs of texts and makes no embeddings: use LLM.score",
                param="model",
            )
        listed = list(prompts) if isinstance(prompts, list | tuple) else [cast("Prompt", prompts)]
        return self._embedded(
            listed, truncate_prompt_tokens, use_tqdm=use_tqdm, lora_request=lora_request
        )

    def _embedded(
        self,
        listed: Sequence[Prompt],
        truncate_prompt_tokens: int | None,
        *,
        use_tqdm: bool,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=1, truncate_prompt_tokens=truncate_prompt_tokens
        )
        adapters = self._digests(lora_request, num_prompts=len(listed))
        listed = [
            self._as_written(index, each, truncate_prompt_tokens)
            for index, each in enumerate(listed)
        ]
        batch = [
            OfflineEmbedding(
                self._prepared(index, prompt, params, task="embed", adapter=adapter)[1]
            )
            for index, (prompt, adapter) in enumerate(zip(listed, adapters, strict=True))
        ]
        self._run(batch, shown=use_tqdm)
        return [each.output() for each in batch]

    def _as_written(self, index: int, prompt: Prompt, kept: int | None) -> Prompt:
        """A text as the model reads it: in lower case, or as its chat template renders it. Other
        prompts are unchanged."""
        fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
        use, text = self._use, fields.get("prompt") if isinstance(fields, Mapping) else None
        if not isinstance(text, str) or "prompt_token_ids" in fields:
            return prompt
        if not use.is_chat:
            return {**fields, "prompt": use.written(text)}
        options = {"add_generation_prompt": use.add_generation_prompt}
        token_ids = self._rendered(use.messages(text), options)
        try:
            use.check_uncut(len(token_ids), self._engine.max_model_len if kept == -1 else kept)
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {index}: {error}", param=error.param) from None
        rest = {name: value for name, value in fields.items() if name != "prompt"}
        return {**rest, "prompt_token_ids": token_ids}

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Scores each text of ``data_2`` against its counterpart in ``data_1``, or against the only
        text there. A reranker's score is its own; any other model's is the similarity of the
        two embeddings: their cosine, unless the checkpoint names another.

        Raises:
            InvalidRequest: As for `embed`; or the numbers of texts do not match; or the inputs of a
                reranker are token ids instead of texts.
        """
        first, second = (
            list(data) if isinstance(data, list | tuple) else [cast("Prompt", data)]
            for data in (data_1, data_2)
        )
        if not first or not second or len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"{len(first)} texts in data_1 and {len(second)} in data_2: give one, or as many",
                param="data_1",
            )
        if self._scoring is not None:
            pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
            return self._scored(pairs, self._scoring, truncate_prompt_tokens, use_tqdm=use_tqdm)
        made = self.embed(
            [*first, *second], truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm
        )
        lefts = made[: len(first)] * (len(second) // len(first))
        return [
            ScoringRequestOutput(
                request_id=right.request_id,
                outputs=ScoringOutput(
                    similarity(
                        np.array(left.outputs.embedding),
                        np.array(right.outputs.embedding),
                        self._use.similarity,
                    )
                ),
                prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids,
                num_cached_tokens=left.num_cached_tokens + right.num_cached_tokens,
            )
            for left, right in zip(lefts, made[len(first) :], strict=True)
        ]

    def _scored(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        scoring: Scoring,
        truncate_prompt_tokens: int | None,
        *,
        use_tqdm: bool,
    ) -> list[ScoringRequestOutput]:
        texts = [
            (left, right)
            for left, right in pairs
            if isinstance(left, str) and isinstance(right, str)
        ]
        if len(texts) < len(pairs):
            raise InvalidRequest("this model scores two texts, not tokens", param="data_1")
        tokenizer = self.get_tokenizer()
        if isinstance(scoring, LogitScore):
            if truncate_prompt_tokens not in (None, -1):
                raise InvalidRequest(
                    f"truncate_prompt_tokens={truncate_prompt_tokens} is not supported for this "
                    "model, whose chat template writes something behind a document",
                    param="truncate_prompt_tokens",
                )
            return self._scored_by_logits(texts, scoring, use_tqdm=use_tqdm)
        listed = [
            {"prompt_token_ids": pair_token_ids(scoring.prompt + left, right, tokenizer)}
            for left, right in texts
        ]
        return [
            ScoringRequestOutput(
                request_id=made.request_id,
                outputs=ScoringOutput(scoring.of(made.outputs.embedding[0])),
                prompt_token_ids=made.prompt_token_ids,
                num_cached_tokens=made.num_cached_tokens,
            )
            for made in self._embedded(listed, truncate_prompt_tokens, use_tqdm=use_tqdm)
        ]

    def _scored_by_logits(
        self, pairs: Sequence[tuple[str, str]], scoring: LogitScore, *, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=scoring.token_ids
        )
        outputs = self.chat(
            [scoring.messages(*pair) for pair in pairs],
            params,
            use_tqdm=use_tqdm,
            add_generation_prompt=scoring.add_generation_prompt,
        )
        made = []
        for output in outputs:
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None, "they were asked for"
            score = scoring.of({token: each.logprob for token, each in logprobs[0].items()})
            made.append(
                ScoringRequestOutput(
                    request_id=output.request_id,
                    outputs=ScoringOutput(score),
                    prompt_token_ids=output.prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
        return made

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, for example before a measurement with a cold cache."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Stops the ranks and frees the KV cache. Can be called again."""
        self._finalizer()
        if self._templates is not None:
            self._templates.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _digests(self, lora_request: LoRARequests, *, num_prompts: int) -> list[str]:
        """The digest of each prompt's adapter; "" for a prompt without one."""
        listed = list(lora_request) if isinstance(lora_request, list | tuple) else None
        if listed is None:
            listed = [cast("LoRARequest | None", lora_request)] * num_prompts
        if len(listed) != num_prompts:
            raise InvalidRequest(
                f"{len(listed)} entries of lora_request for {num_prompts} prompts: give one for "
                "each, None being the model alone, or one for all",
                param="lora_request",
            )
        wanted = dict.fromkeys(each for each in listed if each is not None)
        if wanted and not self.config.enable_lora:
            raise InvalidRequest(
                "lora_request: adapters are not enabled; make the LLM with enable_lora=True",
                param="lora_request",
            )
        found: dict[LoRARequest | None, str] = {None: ""}
        for each in wanted:
            try:
                found[each] = self._adapters.put(fetch_adapter(Path(each.lora_path)))
            except (AdapterError, CheckpointError) as error:
                raise InvalidRequest(
                    f"lora_request {each.lora_name!r}: {error}", param="lora_request"
                ) from error
        return [found[each] for each in listed]

    def _completions(
        self, index: int, prompt: Prompt, params: SamplingParams, priority: int, adapter: str
    ) -> list[OfflineCompletion]:
        """Checks one prompt and returns its ``params.n`` completions. None has begun."""
        text, request = self._prepared(index, prompt, params, priority=priority, adapter=adapter)
        return [
            OfflineCompletion(each, prompt=text, index=number, tokenizer=self._tokenizer)
            for number, each in enumerate(request.completions())
        ]

    def _prepared(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        task: Task = "generate",
        adapter: str = "",
    ) -> tuple[str | None, Prepared]:
        """Checks one prompt. Returns its text (``None`` for token ids) and its request."""
        number, self._num_prompts = self._num_prompts, self._num_prompts + 1
        # Drawn here and not by the engine: the n completions of a prompt have consecutive seeds.
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        try:
            text, token_ids, cache_salt = read_prompt(prompt, tokenizer=self.get_tokenizer)
            params, token_ids = spell_out(
                params,
                token_ids,
                tokenizer=self.get_tokenizer,
                reasoning=reasoning_of,
                max_model_len=self._engine.max_model_len,
                task=task,
            )
            request = Prepared(
                request_id=str(number),
                prompt_token_ids=token_ids,
                sampling=replace(params, seed=seed),
                cache_salt=cache_salt,
                priority=priority,
                task=task,
                adapter=adapter,
            )
            self._engine.check_request(request)
        except InvalidRequest as error:
            raise InvalidRequest(f"prompt {index}: {error}") from None
        return text, request

    def _run(
        self, completions: Sequence[OfflineCompletion | OfflineEmbedding], *, shown: bool
    ) -> None:
        waiting = deque(completions)
        running: dict[str, OfflineCompletion | OfflineEmbedding] = {}
        try:
            with Progress(num_completions=len(completions), shown=shown) as progress:
                while waiting or running:
                    # Keeps the engine's queue full without reaching its limit.
                    while waiting and len(running) < self.config.max_num_waiting:
                        completion = waiting.popleft()
                        self._engine.add_request(completion.request)
                        running[completion.request.request_id] = completion
                    for delta in self._engine.step():
                        completion = running[delta.request_id]
                        completion.receive(delta)
                        progress.advance(delta, completion)
                        if completion.finish_reason is not None:
                            del running[delta.request_id]
                            if delta.finish_reason is None:  # A stop string, which only we see.
                                self._engine.abort(delta.request_id)
        finally:  # After an error, the remaining requests must not run with the next batch.
            for request_id in running:
                self._engine.abort(request_id)


def _path(model: str | Path) -> Path:
    """``model`` as a path. Raises ConfigError if it is empty or not a path."""
    if not isinstance(model, str | PathLike) or not str(model):
        raise ConfigError(
            f"model={model!r}: must be a directory, a GGUF file or ORG/NAME of the Hugging Face hub"
        )
    return Path(model)


def _load_tokenizer(model: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer; ``None`` if it has none, so that its prompts are token ids."""
    return Tokenizer.load(model) if Tokenizer.is_in(model) else None
