"""The dense half of a Mixture-of-Experts model: everything but the routed experts.

transformers builds the model and runs attention, norms, routers and shared experts. Two things are
taken from it: the weights of the routed experts, and the work that they do.

- A subclass of the checkpoint's own class (same name and module, so that transformers finds its
  conversion rules) deletes the parameters of every experts module right after construction, which
  happens on the meta device. The loader reads only tensors that the model has a place for, so
  expert weights are neither allocated nor read.
- transformers hands every experts module's work to a function registered by name
  (ExpertsInterface). Ours passes it to the layer exchange, with the layer's number: the n-th
  experts module in module order is MoE layer n, the same count that the expert store uses.

Prompts run through transformers' own forward. Single tokens, which is where its cost per layer
hurts, run through a recording of it (gpu_worker.decode_step) where the family can be recorded;
`prepare_decode` says whether it can.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from expert_store.checkpoint import open_checkpoint, read_config
from expert_store.packed import gather_packed
from expert_store.quantisation_config import stated_quantisation
from gpu_worker.compilation import CompileFailed, compile_kinds, why_different
from gpu_worker.decode_step import DecodeStep, Segment
from gpu_worker.kv_cache import new_growing_cache
from gpu_worker.native_check import answer_by_weights, why_not_native
from gpu_worker.native_step import NativeStep
from gpu_worker.packed_linear import pack_linears
from gpu_worker.step_trace import Untraceable, trace_step
from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import DynamicCache

    from expert_kernels.native_dense import DenseKernels

log = logging.getLogger("headrace.gpu_worker")

EXPERTS_FUNCTION = "headrace"
#: Rooms of caches end here when no bound is stated.
_MANY_POSITIONS = 1 << 40
#: Tokens of the comparison between recording and model: a prompt, then one by one.
_CHECK_PROMPT = 5
_CHECK_STEPS = 3


class LayerExchange(Protocol):
    """Whoever gets the routed experts of one MoE layer computed."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden [n, H], choices [n, K] and weights [n, K] of the router -> [n, H], same dtype."""


class DenseModel:
    """A causal language model whose routed experts live elsewhere."""

    def __init__(
        self, model: PreTrainedModel, experts: list[Any], max_positions: int = _MANY_POSITIONS
    ) -> None:
        self._model = model
        self._max_positions = max_positions
        self._step: DecodeStep | None = None
        self._native: NativeStep | None = None
        self._experts = experts
        self.num_moe_layers = len(experts)
        self.device = model.device
        parameters = inspect.signature(model.forward).parameters
        self._arguments: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in parameters:
            self._arguments["logits_to_keep"] = 1
        # The name changed within the range of transformers versions that we accept.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().out_features)

    def parameter_names(self) -> list[str]:
        """Names of all weights that are loaded here."""
        return [name for name, _ in self._model.named_parameters()]

    def connect(self, exchange: LayerExchange) -> None:
        """From now on the experts of every layer are computed by `exchange`."""
        for layer, module in enumerate(self._experts):
            module.headrace_layer = layer
            module.headrace_exchange = exchange

    def quantise_linears(self, name: str, kernels: DenseKernels) -> int:
        """Store the large linear layers in the format `name` from now on; how many there are."""
        return pack_linears(self._model, name, kernels)

    def warm_up(self) -> None:
        """One token through the whole model, with experts that answer zero: what cannot run fails
        here, before anybody waits for a token, and first uses are paid for.

        Raises:
            UserError: the model does not hand out its layers as this worker needs them.
        """
        layers: list[int] = []

        def answer_zero(layer, hidden, choices, weights):
            is_flat = hidden.dim() == 2 and choices.shape == weights.shape
            layers.append(layer if is_flat else -1)
            return torch.zeros_like(hidden)

        self.connect(answer_zero)
        self.forward([0], self.new_cache())
        if layers != list(range(self.num_moe_layers)):
            raise UserError(
                f"The experts of {self._model.config.model_type!r} run in another way than one "
                "[rows, hidden] call per MoE layer; choose another model."
            )

    def prepare_decode(self) -> str | None:
        """Record the decode step, so that `forward` of one token runs the recording from now on.

        Returns:
            None, or why this model goes on token by token through transformers.
        """
        self._step = self._native = None
        try:
            trace = trace_step(self._model, self._arguments, self._cache_argument, self.new_cache)
            step = DecodeStep(trace, self.device)
            self._check(step)
        except Untraceable as error:
            return str(error)
        self._step = step
        return None

    def compile_decode(self, report: Callable[[int, int], None]) -> str | None:
        """Compile the recording; `report(done, total)` is called every few seconds.

        Returns:
            None, or why the recording goes on as it was.
        """
        step = self._step
        if step is None:
            return "there is no recording to compile"
        try:
            programs = compile_kinds(step.kinds, report)
        except CompileFailed as error:
            return str(error)
        differences = []

        def look(number: int, inputs: list[torch.Tensor], expected: Any) -> None:
            call = step.calls[number]
            if isinstance(call, Segment):
                program = programs[call.kind]
                differences.append(why_different(program, [*inputs, *call.constants], expected))

        try:
            for _ in self.compare(step, look):
                pass
        except Exception as error:  # a program that compiled and does not run
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        found = next((difference for difference in differences if difference), None)
        if found is not None:
            return f"a compiled part computes something else: {found}"
        step.use(programs)
        return None

    def use_native(self, kernels: DenseKernels) -> str | None:
        """Run the recording natively from now on.

        Returns:
            None, or why it goes on as it was.
        """
        step = self._step
        if step is None:
            return "there is no recording to run"
        native = NativeStep(step, kernels)
        if not native.num_native:
            return f"there is no native kernel for {next(iter(native.reasons.values()), 'it')}"
        for reason in native.reasons.values():
            log.info("a part of every layer runs on torch: no native kernel for %s", reason)
        self.connect(answer_by_weights)
        tokens = self._check_tokens()
        why_not = why_not_native(
            step,
            native,
            lambda cache: self._forward_eager(tokens[:_CHECK_PROMPT], cache),
            self.new_cache,
            tokens[_CHECK_PROMPT:],
            _CHECK_PROMPT,
            self._model.dtype,
        )
        if why_not is None:
            self._native = native
        return why_not

    @property
    def native_step(self) -> NativeStep | None:
        """The native form of the recording, if it is in use."""
        return self._native

    @property
    def decode_step(self) -> DecodeStep | None:
        """The recording in use, if any."""
        return self._step

    def _check(self, step: DecodeStep) -> None:
        """Raises Untraceable unless the recording and the model agree bit for bit."""
        for logits, expected in self.compare(step):
            if not torch.equal(logits, expected):
                raise Untraceable("its recording computes something else")

    def compare(
        self, step: DecodeStep, look: Callable[[int, list[torch.Tensor], Any], None] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of `step` and of the model, for some tokens one after the other. The exchange is
        replaced by one whose answer depends on all that a router says, and must be connected anew.
        `look` is passed on to the step."""
        self.connect(_answer_by_choices)
        tokens = self._check_tokens()
        caches = [self.new_cache(), self.new_cache()]
        for cache in caches:
            self._forward_eager(tokens[:_CHECK_PROMPT], cache)
        for position in range(_CHECK_PROMPT, len(tokens)):
            logits = step.run(tokens[position], position, caches[0], look)
            yield logits, self._forward_eager([tokens[position]], caches[1])

    def _check_tokens(self) -> list[int]:
        return [number % self.vocab_size for number in range(3, 3 + _CHECK_PROMPT + _CHECK_STEPS)]

    def new_cache(self) -> DynamicCache:
        """An empty KV cache that fits the model's kinds of layers."""
        return new_growing_cache(self._model.config, self._max_positions)

    def forward(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        """Run `tokens` after the positions that `cache` holds and add them to it.

        Returns:
            The last token's logits, [vocab], on the model's device, in the model's dtype.
        """
        if self._native is not None and len(tokens) == 1:
            return self._native.run(tokens[0], cache.get_seq_length(), cache)
        if self._step is not None and len(tokens) == 1:
            return self._step.run(tokens[0], cache.get_seq_length(), cache)
        return self._forward_eager(tokens, cache)

    def _forward_eager(self, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
        input_ids = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        arguments = {**self._arguments, self._cache_argument: cache}
        return self._model(input_ids, **arguments).logits[0, -1]


def load_dense_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int = _MANY_POSITIONS,
) -> DenseModel:
    """Load the dense half of the checkpoint in `directory`, local files only. No sequence will hold
    more than `max_positions` tokens.

    Raises:
        UserError: no MoE model that transformers can run, or weights missing, misshapen or NaN.
    """
    _quiet_transformers()
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{directory}: transformers has no causal language model for {config.model_type!r}; "
            "choose another model."
        )
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # a training loss; it would cost every layer
    base = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    state = _unpacked_state(directory, dtype)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # what is left to load is no longer quantised
    try:
        model, info = _without_experts(base).from_pretrained(
            directory if state is None else None,
            state_dict=state,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa" if base._supports_sdpa else "eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().split("\n", 1)[0]
        raise UserError(
            f"{directory}: the dense weights do not load: {first_line}; download the model again."
        ) from error
    _check(directory, model, info)
    experts = list(_experts_modules(model))
    if not experts:
        raise UserError(
            f"{directory}: {config.model_type!r} has no routed experts that transformers hands "
            "out; choose a Mixture-of-Experts model."
        )
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_FUNCTION, _run_experts)
    model.set_experts_implementation(EXPERTS_FUNCTION)
    return DenseModel(model.to(device).eval().requires_grad_(False), experts, max_positions)


def _unpacked_state(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
    """The dense weights of a quantised checkpoint as floats; None for a plain one, which
    transformers reads by itself."""
    if stated_quantisation(directory, read_config(directory)[0]) is None:
        return None
    # Only such a checkpoint pays for the import and for building the model's shape.
    from expert_store.dense_weights import dense_state
    from expert_store.families import read_model_shape

    checkpoint = gather_packed(open_checkpoint(directory))
    return dense_state(read_model_shape(checkpoint), checkpoint, dtype)


def _answer_by_choices(
    layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An exchange for comparisons: [n, H] that tells choices, weights and their pairing."""
    factors = (weights.float() * ((choices + layer) % 7)).sum(dim=1, keepdim=True) / 7
    return (hidden.float() * factors).to(hidden.dtype)


def _run_experts(
    module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    return module.headrace_exchange(module.headrace_layer, hidden, choices, weights)


def _experts_modules(model: torch.nn.Module):
    """The experts modules in the order of their layers: those that ExpertsInterface serves."""
    return (module for module in model.modules() if hasattr(module, "is_concatenated"))


def _without_experts(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of `base` that has no parameters in its experts modules."""

    def __init__(self, config, *args, **kwargs):
        base.__init__(self, config, *args, **kwargs)
        for module in _experts_modules(self):
            for name in list(module._parameters):
                del module._parameters[name]
            module._is_hf_initialized = True  # nothing in it to fill with random numbers

    namespace = {"__init__": __init__, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), namespace)


def _check(directory: Path, model: PreTrainedModel, info: Any) -> None:
    """Raises UserError when a dense weight is missing (it would be random) or NaN."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{directory}: {len(missing)} dense weights are missing, among them {missing[0]}; "
            "download the model again."
        )
    unexpected = sorted(name for name in info["unexpected_keys"] if "expert" not in name)
    if unexpected:
        log.info(
            "%d tensors of the checkpoint are not used, such as %s", len(unexpected), unexpected[0]
        )
    for name, weight in model.named_parameters():
        # NaN wins every maximum: one pass, no temporary.
        if weight.numel() and weight.is_floating_point() and bool(weight.amax().isnan()):
            raise UserError(f"{directory}: the weight {name} holds NaN; download the model again.")


def _quiet_transformers() -> None:
    """This process reports its own progress; the library's bars and hints would mix into it."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
