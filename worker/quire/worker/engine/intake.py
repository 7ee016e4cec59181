"""Checks requests against an engine's limits, and makes their sequences."""

from quire.worker.engine.part import ChoicesOf
from quire.worker.engine.sequence import Sequence
from quire.worker.model.facts import ModelFacts
from quire.worker.request.check import max_tokens_of
from quire.worker.request.config import EngineConfig
from quire.worker.request.limits import RequestLimits, derive_seed
from quire.worker.request.request import Prepared
from quire.worker.step.messages import Executor


class Intake:
    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        executor: Executor,
        *,
        limits: RequestLimits,
        choices_of: ChoicesOf,
    ) -> None:
        self.limits = limits
        self._config = config
        self._model = model
        self._numerics = executor.numerics
        self._choices_of = choices_of
        self._num_unseeded = 0

    def max_tokens(self, request: Prepared) -> int:
        """Most output tokens of the request. Raises InvalidRequest if it can never be served."""
        takes_adapters = self._config.enable_lora
        return max_tokens_of(request, self.limits, self._model, takes_adapters=takes_adapters)

    def sequence(self, request: Prepared, max_tokens: int) -> Sequence:
        seed = request.sampling.seed
        if seed is None:
            seed = derive_seed(self._config.seed, self._num_unseeded)
            self._num_unseeded += 1
        chain = None
        if self._config.enable_prefix_caching and not self._model.is_encoder:
            chain = request.chain(
                model_fingerprint=self._model.fingerprint,
                numerics=self._numerics,
                kv_dtype=self._model.kv_dtype,
                block_size=self._config.block_size,
            )
        return Sequence(
            request,
            seed=seed,
            max_tokens=max_tokens,
            eos_token_ids=self._model.eos_token_ids,
            block_size=self._config.block_size,
            chain=chain,
            choices=self._choices_of(request, request.sampling.end_ids(self._model.eos_token_ids)),
        )
