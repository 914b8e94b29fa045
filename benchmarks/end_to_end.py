"""Tokens per second of the whole pipeline without a GPU, for each format of experts, beside others.

    python -m benchmarks.end_to_end                        Qwen3-MoE, 12 layers x 64 experts, random
    python -m benchmarks.end_to_end --formats int4 --json
    python -m benchmarks.end_to_end --quick                a model of 30 MB: does it run?

A random checkpoint is written (7.8 GB, kept in --model when that is given), then `headrace
generate --device cpu` decodes 64 tokens after a prompt of 32, one run for each format, each with a
pipeline of its own, the large linear layers in the experts' format. Beside it: transformers' eager
experts in the same dtype, and llama.cpp where llama-cpp-python is installed and --llama-gguf names
the same model in its format.

    tok/s     tokens after the first, per second
    GB/token  bytes of weights that a token needs: top_k experts of each layer and the dense part
    GB/s      the product of both: what of the memory's bandwidth is reached
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.random_checkpoint import make_random_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ("bf16", "fp16", "fp32")
FORMATS = ("bf16", "int8", "fp8", "int4", "mxfp4", "nvfp4")
PROMPT = "A headrace brings the water here"  # 32 tokens of the checkpoint's tokenizer
SHAPE = {
    "num_layers": 12,
    "num_experts": 64,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "vocab_size": 32_000,
}
QUICK_SHAPE = {
    "num_layers": 2,
    "num_experts": 16,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
}


def run_headrace(
    model: Path, expert_dtype: str, dense_dtype: str, num_tokens: int, flags: list[str]
) -> Any:
    """One pipeline, one text: the JSON object of `headrace generate`, and the layout's sizes."""
    shared = ["--model", str(model), "--expert-dtype", expert_dtype, "--json"]
    shared += ["--dense-dtype", dense_dtype]
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "orchestrator.cli.main", "generate", *shared,
            "--device", "cpu", "--prompt", PROMPT, "--max-tokens", str(num_tokens),
            "--temperature", "0", "--ignore-eos", *flags,
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"end_to_end: {expert_dtype}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def plan(model: Path, expert_dtype: str, dense_dtype: str) -> Any:
    """Sizes of the model in a format, from `headrace plan`."""
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "orchestrator.cli.main", "plan", "--model", str(model),
            "--expert-dtype", expert_dtype, "--dense-dtype", dense_dtype, "--slots", "1", "--json",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return json.loads(done.stdout)


def run_transformers(model: Path, num_tokens: int, num_threads: int) -> float:
    """Tokens per second of transformers' eager experts in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, experts_implementation="eager"
        ).eval()
        inputs = torch.tensor([list(range(32, 64))])
        output = loaded(inputs, use_cache=True)
        started = time.monotonic()
        for _ in range(num_tokens - 1):
            token = output.logits[:, -1:].argmax(-1)
            output = loaded(token, cache=output.past_key_values, use_cache=True)
        return (num_tokens - 1) / (time.monotonic() - started)


def run_llama(gguf: Path, num_tokens: int, num_threads: int) -> float:
    """Tokens per second of llama.cpp. Raises ImportError without llama-cpp-python."""
    from llama_cpp import Llama

    llama = Llama(str(gguf), n_ctx=256, n_threads=num_threads, verbose=False)
    llama.eval(list(range(32, 64)))
    started = time.monotonic()
    for _ in range(num_tokens - 1):
        llama.eval([llama.sample(temp=0)])
    return (num_tokens - 1) / (time.monotonic() - started)


def measure(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in args.formats:
        dense_dtype = name if name not in PLAIN and args.dense == "same" else "auto"
        sizes = plan(model, name, dense_dtype)
        active_bytes = sizes["num_layers"] * sizes["top_k"] * sizes["expert_bytes"]
        runs = [
            run_headrace(model, name, dense_dtype, args.tokens, args.flags.split())
            for _ in range(args.repeat)
        ]
        rate = statistics.median(run["tokens_per_s"] for run in runs)
        token_bytes = active_bytes + sizes["dense_bytes"]
        rows.append(
            {
                "program": "headrace",
                "expert_dtype": name,
                "dense_dtype": dense_dtype,
                "tokens_per_s": rate,
                "gb_per_token": token_bytes / 1e9,
                "gbps": rate * token_bytes / 1e9,
                "store_gb": sizes["store_bytes"] / 1e9,
                "hits": runs[0]["hits"],
                "fills": runs[0]["fills"],
                "cpu_experts": runs[0]["cpu_experts"],
            }
        )
    if not args.skip_transformers:
        rate = run_transformers(model, args.tokens, args.threads)
        rows.append({"program": "transformers", "expert_dtype": "bf16", "tokens_per_s": rate})
    for gguf in args.llama_gguf:
        try:
            rate = run_llama(gguf, args.tokens, args.threads)
        except ImportError:
            print("end_to_end: llama-cpp-python is not installed; skipped", file=sys.stderr)
            break
        rows.append({"program": "llama.cpp", "expert_dtype": gguf.stem, "tokens_per_s": rate})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="made if it is not there")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="NAME")
    parser.add_argument(
        "--dense",
        choices=("same", "auto"),
        default="same",
        help="the large linear layers: in the experts' format, or as they are (default: same)",
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of the other programs")
    parser.add_argument(
        "--flags",
        default="--slots 1 --fill none",
        metavar="TEXT",
        help="of `headrace generate`, in quotes (default: %(default)s: the CPU runs all experts)",
    )
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--llama-gguf", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if not (model / "config.json").is_file():
            make_random_checkpoint(model, **(QUICK_SHAPE if args.quick else SHAPE))
        rows = measure(args, model)
    if args.json:
        print(json.dumps({"prompt": len(PROMPT), "tokens": args.tokens, "rows": rows}, indent=2))
        return 0
    table = Table("program", "experts", "tok/s", "GB/token", "GB/s")
    for row in rows:
        figures = [f"{row[name]:.2f}" if name in row else "" for name in ("gb_per_token", "gbps")]
        table.add_row(row["program"], row["expert_dtype"], f"{row['tokens_per_s']:.2f}", *figures)
    Console().print(table)
    if not args.llama_gguf:
        Console(stderr=True).print("llama.cpp: skipped, no --llama-gguf given")
    return 0


if __name__ == "__main__":
    sys.exit(main())
