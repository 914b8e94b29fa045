"""A tokenizer with one token per byte, so that characters beyond ASCII are split over tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
