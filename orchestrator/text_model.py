"""Text to tokens and back, with what the checkpoint says about ends and lengths.

The tokenizer is the checkpoint's own `tokenizer.json`, run by the `tokenizers` package; special
tokens go in front of a prompt only as its post-processor says. Turning tokens into text is done
piece by piece: a token may end in the middle of a UTF-8 character, or take its leading space from
its neighbour, so a piece is the growth of a decoded window that begins a few tokens earlier.
"""

from __future__ import annotations

import json
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizers import Tokenizer

log = logging.getLogger("headrace")

_REPLACEMENT = "\ufffd"
#: An unfinished UTF-8 character has at most three bytes, and shows as at most so many marks.
_MAX_UNFINISHED = 3
#: Prompt tokens in the first window: enough that a decoder does not take the first new token for
#: the beginning of a text (and strip its space).
_CONTEXT_TOKENS = 5
_DEFAULT_CONTEXT = 4096
#: Families whose layers forget what came before when several tokens follow earlier ones: in
#: transformers, jamba's mamba layers begin anew. One token at a time they go on as they should.
_WHOLE_PROMPT_FAMILIES = frozenset({"jamba"})
#: Longest prompt of such a family: all of it is rows of one step.
MAX_WHOLE_PROMPT = 2048
#: Characters, or tokens, from which on the other threads of the process are let run meanwhile.
_LONG = 10_000


def _warn(note: str) -> None:
    log.warning("%s", note)


class TextModel:
    """Tokenizer, end tokens and limits of one checkpoint."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_tokens: frozenset[int],
        context: int,
        vocab_size: int,
        *,
        is_prompt_whole: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_tokens = eos_tokens
        #: Positions that one sequence may hold, prompt included.
        self.context = context
        self.vocab_size = vocab_size
        self._is_prompt_whole = is_prompt_whole

    def rows_per_step(self, max_rows: int) -> int:
        """Tokens that one step must take: `max_rows`, or all of the longest prompt where the model
        cannot take a prompt in parts."""
        if not self._is_prompt_whole:
            return max_rows
        return max(max_rows, min(self.context, MAX_WHOLE_PROMPT))

    @classmethod
    def load(
        cls,
        model_dir: Path,
        max_context: int | None = None,
        tell: Callable[[str], None] = _warn,
    ) -> TextModel:
        """Read tokenizer.json, config.json and generation_config.json; `tell` what of them cannot
        be used and is made up for.

        Raises:
            UserError: a file is missing or broken.
        """
        if not model_dir.is_dir():
            raise UserError(
                f"There is no directory {model_dir}; name the Hugging Face checkpoint directory of "
                "a Mixture-of-Experts model."
            )
        config_path = model_dir / "config.json"
        config = read_json(config_path)
        generation = model_dir / "generation_config.json"
        generation_config = read_json(generation) if generation.exists() else {}
        tokenizer = _read_tokenizer(model_dir / "tokenizer.json")
        text_config = config.get("text_config")
        nested = text_config if isinstance(text_config, dict) else {}
        context = _first_int((config, nested), "max_position_embeddings") or _DEFAULT_CONTEXT
        if max_context is not None:
            context = min(context, max_context)
        eos = config.get("eos_token_id", nested.get("eos_token_id"))
        vocab_size = _first_int((config, nested), "vocab_size") or tokenizer.get_vocab_size()
        family = nested.get("model_type", config.get("model_type"))
        return cls(
            tokenizer,
            _ends(((generation, generation_config.get("eos_token_id")), (config_path, eos)), tell),
            context,
            vocab_size,
            is_prompt_whole=family in _WHOLE_PROMPT_FAMILIES,
        )

    def why_wrong_length(self, tokens: list[int]) -> str | None:
        """Why a prompt of these tokens cannot be continued, or None."""
        if not tokens:
            return "The prompt is empty; give it at least one token."
        if len(tokens) >= self.context:
            return (
                f"The prompt has {len(tokens)} tokens and the context holds {self.context}, "
                "prompt and answer together; shorten the prompt."
            )
        if self._is_prompt_whole and len(tokens) > MAX_WHOLE_PROMPT:
            return (
                f"The prompt has {len(tokens)} tokens, and this model takes a prompt only as a "
                f"whole, at most {MAX_WHOLE_PROMPT} tokens; shorten the prompt."
            )
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                return (
                    f"Token {token} of the prompt is outside the model's vocabulary of "
                    f"{self.vocab_size}; use the model's own tokenizer."
                )
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text. A chat template writes special tokens itself: then none are added."""
        if len(text) < _LONG:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        # Only of a batch does the package let go of the interpreter's lock. A few MB take seconds,
        # and the orchestrator's loop must go on beside a thread that tokenises.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def entry(self, token: int) -> str | None:
        """How the vocabulary writes a token; None where it has none of this number."""
        entry: str | None = self._tokenizer.id_to_token(token)
        return entry

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether the vocabulary writes bytes as printable stand-ins, as GPT-2's does."""
        decoder = json.loads(self.tokenizer_json).get("decoder") or {}
        parts = [decoder, *decoder.get("decoders", ())]
        return any(part.get("type") == "ByteLevel" for part in parts)

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the `tokenizers` package writes it."""
        return str(self._tokenizer.to_str())

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        if len(tokens) < _LONG:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        (text,) = self._tokenizer.decode_batch([tokens], skip_special_tokens=True)
        return str(text)


class Detokenizer:
    """Text of one sequence as it grows: pieces that joined are the text, never half a character."""

    def __init__(self, model: TextModel, prompt_tokens: list[int]) -> None:
        self._model = model
        self._window = prompt_tokens[-_CONTEXT_TOKENS:]
        self._num_context = len(self._window)
        #: What nobody needs to be told again. Marks at the end of a prompt count as said: if the
        #: next token turns them into a character, the text differs from here on and is told.
        self._said = model.decode(self._window)

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._window.append(token)
        whole = self._model.decode(self._window)
        num_unfinished = _num_unfinished(whole)
        start = _num_common(self._said, whole)
        end = max(start, len(whole) - num_unfinished)
        self._said = whole[:end]
        if num_unfinished == 0:
            # Everything is said: the tokens since the last such moment become the new context.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._said = self._model.decode(self._window)
        return whole[start:end]

    def finish(self) -> str:
        """What was held back because it might have become a character."""
        whole = self._model.decode(self._window)
        return whole[_num_common(self._said, whole) :]


def _num_common(said: str, whole: str) -> int:
    """Length of the common start of two texts."""
    if whole.startswith(said):
        return len(said)
    return next(
        (i for i, (a, b) in enumerate(zip(said, whole, strict=False)) if a != b),
        min(len(said), len(whole)),
    )


def _num_unfinished(text: str) -> int:
    """Marks at the end of `text` that may yet become a character."""
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNFINISHED)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        UserError: missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"There is no {path.name} in {path.parent}; a model is a Hugging Face checkpoint "
            "directory."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; download the model again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; download the model again.")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise UserError(
            f"There is no tokenizer.json in {path.parent}, so the prompt cannot become tokens; "
            "download the model's tokenizer.json as well."
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for every fault
        raise UserError(
            f"{path} is not a tokenizer: {_one_line(error)}; download it again."
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _first_int(configs: tuple[dict[str, Any], ...], key: str) -> int | None:
    for config in configs:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _ends(
    candidates: tuple[tuple[Path, object], ...], tell: Callable[[str], None]
) -> frozenset[int]:
    """The first `eos_token_id` that can be used: a number or a list of numbers. None is absent."""
    for path, value in candidates:
        if value is None:
            continue
        try:
            return frozenset(
                msgspec.convert(value if isinstance(value, list) else [value], list[int])
            )
        except msgspec.ValidationError:
            tell(
                f"{path}: eos_token_id is {repr(value)[:60]}, which is no token id and no list of "
                "them; it is not used"
            )
    return frozenset()
