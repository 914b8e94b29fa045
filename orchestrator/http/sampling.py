"""From a request's fields to what the sampler is told, with the checkpoint's own defaults."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.http.errors import bad_request
from orchestrator.requests import why_not_sampled
from orchestrator.text_model import read_json
from protocol.messages import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.http.schemas import Sampled

log = logging.getLogger("headrace")

_SEED_BITS = 63
#: What many clients send who want none.
_SEED_OF_CHANCE = -1


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request that says nothing gets: OpenAI's values, or the checkpoint's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """What generation_config.json recommends, if it recommends sampling at all. One that cannot be
    used as a whole is told, and not used at all."""
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    if not config.get("do_sample"):
        return SamplingDefaults()
    given = {
        name: value
        for name in SamplingDefaults.__struct_fields__
        if (value := config.get(name)) is not None
    }
    sentence = _why_no_defaults(given)
    if sentence is None:
        return SamplingDefaults(**given)
    log.warning(
        "%s: %s Its settings are not used: a request that says none gets OpenAI's.", path, sentence
    )
    return SamplingDefaults()


def _why_no_defaults(given: dict[str, Any]) -> str | None:
    for name, value in given.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            number = "whole number" if name == "top_k" else "number"
            return f"{name} is {repr(value)[:60]}, which is no {number}."
    top_k = max(0, given.get("top_k", 0))  # -1 is off, too
    return why_not_sampled(SamplingParams(**{**given, "top_k": top_k}))


def sampling_of(
    body: Sampled, defaults: SamplingDefaults, num_logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Parameters of the first choice; see `for_choice`.

    Raises:
        ApiError: 400, a value that the sampler does not take.
    """
    biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    for token in biases:
        if token >= vocab_size:
            raise bad_request(
                f"logit_bias names token {token}; the vocabulary has {vocab_size}.", "logit_bias"
            )
    sampling = SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_k=max(0, _or(body.top_k, defaults.top_k)),  # -1 is off, too
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        seed=_first_seed(body.seed),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=biases,
        num_logprobs=num_logprobs,
    )
    sentence = why_not_sampled(sampling)
    if sentence is not None:
        raise bad_request(sentence, sentence.split()[0])
    return sampling


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choice 0 is what a request for one would get; the others have seeds of their own."""
    return msgspec.structs.replace(sampling, seed=_seed(sampling.seed + index))


def _first_seed(wanted: int | None) -> int:
    """A seed of chance where none is wished for; a negative one is as good as any."""
    if wanted is None or wanted == _SEED_OF_CHANCE:
        return random.getrandbits(_SEED_BITS)
    return _seed(wanted)


def _seed(number: int) -> int:
    return number & ((1 << _SEED_BITS) - 1)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
