"""llama.cpp in a process of its own, for benchmarks.end_to_end: one greedy text, or its quantiser.

    python -m benchmarks.llama_process generate FILE --prompt 1 2 3 --tokens 64 --threads 2
    python -m benchmarks.llama_process quantise FILE NEW

Answers with a JSON object. Uses llama.cpp's own functions rather than llama-cpp-python's `Llama`,
which wants a tokenizer and copies logits about.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

# Of ggml.h; llama-cpp-python does not name them.
_GGML_TYPE_BF16 = 30
_GGML_LOG_LEVEL_ERROR = 4


@llama_cpp.llama_log_callback
def _errors_only(level: int, text: bytes, _: object) -> None:
    if level == _GGML_LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def generate(
    path: str, prompt: list[int], num_tokens: int, num_threads: int, use_mmap: bool
) -> dict[str, Any]:
    """Tokens of a greedy text that stops at no token, and the rate of those after the first."""
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_mmap = use_mmap
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(prompt) + num_tokens
    params.n_batch = params.n_ubatch = max(len(prompt), 32)
    params.n_threads = params.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp has no context for {path}")
    num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def step(tokens: list[int]) -> int:
        # The batch only points to the array, so the array must outlive it.
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp failed to decode")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (num_vocab,)).argmax())

    tokens = [step(prompt)]
    started = time.monotonic()
    while len(tokens) < num_tokens:
        tokens.append(step(tokens[-1:]))
    elapsed_s = time.monotonic() - started
    return {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        "tokens": tokens,
        "tokens_per_s": (num_tokens - 1) / elapsed_s,
    }


def quantise(source: str, path: str) -> None:
    """Write `source` (bf16) with q4_k in every large matrix but the embedding, which is kept."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S
    params.pure = True  # no tensor gets more bits than the others
    params.output_tensor_type = llama_cpp.GGML_TYPE_Q4_K
    params.token_embedding_type = _GGML_TYPE_BF16
    if llama_cpp.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp cannot quantise {source}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.llama_process",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    text = verbs.add_parser("generate")
    text.add_argument("path", metavar="FILE")
    text.add_argument("--prompt", type=int, nargs="+", required=True, metavar="ID")
    text.add_argument("--tokens", type=int, default=64)
    text.add_argument("--threads", type=int, default=2)
    text.add_argument("--no-mmap", action="store_true", help="read the file into memory of its own")
    files = verbs.add_parser("quantise")
    files.add_argument("path", metavar="FILE")
    files.add_argument("new", metavar="NEW")
    args = parser.parse_args()
    llama_cpp.llama_log_set(_errors_only, ctypes.c_void_p())
    if args.verb == "quantise":
        quantise(args.path, args.new)
        return 0
    answer = generate(args.path, args.prompt, args.tokens, args.threads, not args.no_mmap)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
