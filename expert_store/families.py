"""From a checkpoint's config to the model's shape: which modules are experts, and of what form.

transformers knows the families; nothing here names one. The model is built on the meta device
(shapes without data), its experts modules are found by what transformers' ExpertsInterface leaves
on them, and all of them must share one form. Whatever cannot run is refused here, by name, before
a byte of the weights is read.

Needs torch and transformers: import it in the loader process and in workers, never elsewhere.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
from msgspec import structs
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from expert_store.dense_linears import large_linears
from expert_store.formats import num_tiles
from expert_store.gates import UnsupportedModelError, derive_form, is_experts, prove_form
from expert_store.layout import ITEM_BYTES, Dtype, ExpertForm, StoreLayout, make_layout
from expert_store.packed import PACKED_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from expert_store.checkpoint import Checkpoint
    from expert_store.formats import WeightFormat

SAFETENSORS_DTYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
    "top_k",
)
#: Layers that may come of one tensor of a file: far more than in any layout that stacks them.
_LAYERS_PER_TENSOR = 256


@dataclass(frozen=True)
class ExpertsModule:
    """One MoE layer of the model."""

    path: str
    """Name of the experts module, e.g. "model.layers.3.mlp.experts"."""
    model_layer_id: int
    num_experts: int


@dataclass(frozen=True)
class ModelShape:
    """A model without its weights, and what Headrace needs to know about it."""

    config: Any
    """The config to build the language model with (its text part when the model has others)."""
    model_class: type[nn.Module]
    meta_model: nn.Module
    experts: tuple[ExpertsModule, ...]
    form: ExpertForm
    top_k: int

    @property
    def text_config(self) -> Any:
        """Where the sizes of the language model are; ``config`` itself for text-only models."""
        return self.config.get_text_config()

    def is_expert_parameter(self, name: str) -> bool:
        """True when the parameter belongs to a routed expert, not to the dense half."""
        return name.rpartition(".")[0] in {module.path for module in self.experts}


def resolve_model_class(checkpoint: Checkpoint) -> tuple[Any, type[nn.Module]]:
    """The text model's config and its CausalLM class, as AutoModelForCausalLM would choose.

    Raises UnsupportedModelError for architectures that transformers does not know, or knows no
    text generation for.
    """
    model_type = checkpoint.config["model_type"]
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(
                checkpoint.directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        known = "does not recognize this architecture" not in str(error)
        raise UnsupportedModelError(
            f"{checkpoint.directory / 'config.json'}: "
            + (
                f"not a valid {model_type} config: {reason}; correct the file"
                if known
                else f"unknown architecture {model_type!r}; the installed transformers has none of"
                " that name, so upgrade it or choose another model"
            )
        ) from error
    for candidate in (config, config.get_text_config()):
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            # A multimodal config may map to the class of its text part alone.
            if model_class.config_class is type(config.get_text_config()):
                return config.get_text_config(), model_class
            if model_class.config_class is type(candidate):
                return candidate, model_class
    raise UnsupportedModelError(
        f"{checkpoint.directory}: transformers has no text generation for {model_type!r};"
        " choose a causal language model"
    )


def read_model_shape(checkpoint: Checkpoint) -> ModelShape:
    """Build the model on meta and find its experts. Raises UnsupportedModelError."""
    config, model_class = resolve_model_class(checkpoint)
    family = f"{checkpoint.directory}: {model_class.__name__} ({config.model_type})"
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    most_layers = _LAYERS_PER_TENSOR * max(1, len(checkpoint.tensors))
    if isinstance(num_layers, int) and num_layers > most_layers:
        # To build them, only to find that they have no weights, could take hours.
        raise UnsupportedModelError(
            f"{family}: its config has {num_layers} layers and its files have"
            f" {len(checkpoint.tensors)} tensors; config.json and weights belong to different"
            " models"
        )
    try:
        with torch.device("meta"), _quiet_transformers():
            meta_model = model_class(config)
    except Exception as error:
        raise UnsupportedModelError(
            f"{family}: the model cannot be built from its config"
            f" ({type(error).__name__}: {error}); correct config.json"
        ) from error
    found = [(path, module) for path, module in meta_model.named_modules() if is_experts(module)]
    if not found:
        raise UnsupportedModelError(_no_experts(meta_model, family))
    forms = [derive_form(module, family) for _, module in found]
    for (path, _), form in zip(found, forms, strict=True):
        if form != forms[0]:
            raise UnsupportedModelError(
                f"{family}: the experts of {path} differ in shape or gate from those of"
                f" {found[0][0]}; models with unlike MoE layers are not supported"
            )
    if min(forms[0].hidden_size, forms[0].intermediate_size) < 1:
        raise UnsupportedModelError(
            f"{family}: by its config an expert is of {forms[0].hidden_size} x"
            f" {forms[0].intermediate_size} numbers; correct config.json"
        )
    prove_form(found[0][1], forms[0], family)
    top_k = _top_k(config.get_text_config(), family)
    most_experts = max(module.num_experts for _, module in found)
    if top_k > most_experts:
        raise UnsupportedModelError(
            f"{family}: its config says that a token uses {top_k} of {most_experts} experts;"
            " correct config.json"
        )
    return ModelShape(
        config=config,
        model_class=model_class,
        meta_model=meta_model,
        experts=tuple(
            ExpertsModule(path, _layer_id(path, family), module.num_experts)
            for path, module in found
        ),
        form=forms[0],
        top_k=top_k,
    )


def choose_dtype(shape: ModelShape, checkpoint: Checkpoint, wanted: str) -> Dtype:
    """``wanted``, or for "auto" the config's dtype, or else that of most bytes on disk."""
    if wanted == "auto":
        stated = getattr(shape.config, "dtype", None) or getattr(shape.text_config, "dtype", None)
        if stated is not None:
            wanted = str(stated).removeprefix("torch.")
        else:
            sizes: dict[str, int] = {}
            for tensor in checkpoint.tensors.values():
                if tensor.dtype == PACKED_DTYPE:
                    continue
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
            wanted = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
            wanted = SAFETENSORS_DTYPE.get(wanted, wanted)
    for dtype in get_args(Dtype):
        if dtype == wanted:
            return dtype
    raise UnsupportedModelError(
        f"{checkpoint.directory}: dtype {wanted} is not supported;"
        f" choose --dtype {'|'.join(get_args(Dtype))}"
    )


def store_layout(
    shape: ModelShape, checkpoint: Checkpoint, dtype: Dtype, weights: WeightFormat | None = None
) -> StoreLayout:
    """Where each expert will lie; `weights` None: row-major in ``dtype``, as the model has it."""
    form = shape.form
    if weights is not None:
        form = structs.replace(form, is_transposed=False, is_interleaved=False)
    return make_layout(
        model_name=checkpoint.name,
        checkpoint_fingerprint=checkpoint.fingerprint,
        form=form,
        dtype=dtype,
        weights=weights,
        model_layer_ids=tuple(module.model_layer_id for module in shape.experts),
        num_experts=tuple(module.num_experts for module in shape.experts),
        top_k=shape.top_k,
    )


def dense_bytes(shape: ModelShape, dtype: Dtype, linears: WeightFormat | None = None) -> int:
    """Bytes of all parameters but the experts', tied ones once, in ``dtype``; of large linear
    layers in the format ``linears``, if there is one."""
    model: Any = shape.meta_model
    num_bytes = sum(
        parameter.numel() * ITEM_BYTES[dtype]
        for name, parameter in model.named_parameters()
        if not shape.is_expert_parameter(name)
    )
    if linears is None:
        return num_bytes
    for path, linear in large_linears(model):
        if shape.is_expert_parameter(f"{path}.weight"):
            continue
        num_bytes += num_tiles(linear.out_features) * linears.tile_bytes(linear.in_features)
        if linear.weight is not model.get_input_embeddings().weight:  # else both are kept
            num_bytes -= linear.weight.numel() * ITEM_BYTES[dtype]
    return num_bytes


def kv_bytes_per_token(config: Any, dtype: Dtype) -> int:
    """Estimate of the key-value cache of one token over all attention layers, in bytes.

    Keys and values of every key-value head; where heads share a latent (``kv_lora_rank``),
    transformers caches the full heads.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        key_size = config.qk_nope_head_dim + config.qk_rope_head_dim
        values = heads * (key_size + config.v_head_dim)
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        values = 2 * kv_heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    layer_types = getattr(config, "layer_types", None)
    num_layers = (
        sum("attention" in kind and "linear" not in kind for kind in layer_types)
        if layer_types
        else config.num_hidden_layers
    )
    return num_layers * values * ITEM_BYTES[dtype]


def _no_experts(meta_model: nn.Module, family: str) -> str:
    own = sorted(
        {
            type(module).__name__
            for name, module in meta_model.named_modules()
            if "expert" in type(module).__name__.lower() or name.endswith(".experts")
        }
    )
    if own:
        return (
            f"{family}: its experts ({', '.join(own[:3])}) do not go through transformers'"
            " experts interface; this family is not supported"
        )
    return (
        f"{family}: a dense model without routed experts; Headrace runs Mixture-of-Experts models"
    )


def _layer_id(path: str, family: str) -> int:
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", path)
    if len(numbers) != 1:
        raise UnsupportedModelError(
            f"{family}: experts at {path}, which is not one layer of one stack of layers;"
            " this family is not supported"
        )
    return int(numbers[0])


def _top_k(config: Any, family: str) -> int:
    for name in _TOP_K_NAMES:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(
        f"{family}: its config does not say how many experts a token uses;"
        f" set {_TOP_K_NAMES[0]} in config.json"
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No chatter: what matters is raised, and standard error belongs to the progress."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
