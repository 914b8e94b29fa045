"""Tokens per second of the whole pipeline without a GPU, for each format of experts, beside others.

    python -m benchmarks.end_to_end                        Qwen3-MoE, 12 layers x 64 experts, random
    python -m benchmarks.end_to_end --formats int4 --json
    python -m benchmarks.end_to_end --quick                a model of 30 MB: does it run?
    python -m benchmarks.end_to_end --formats bf16 int8 int4 --llama --repeat 5

A random checkpoint is written (7.8 GB, kept in --model when that is given), then `headrace
generate --device cpu` decodes 64 tokens after a prompt of 32, one run for each format, each with a
pipeline of its own, the large linear layers in the experts' format. Beside it: transformers' eager
experts in the same dtype, and with --llama llama.cpp on the same weights at equal bits, the two by
turns (the extra `peers`; llama.cpp's files lie beside the model and are used again).

    tok/s     tokens after the first, per second
    GB/token  bytes of weights that a token needs: top_k experts of each layer and the dense part
    GB/s      the product of both: what of the memory's bandwidth is reached
    headrace  its tokens/s over those of this program, median of neighbouring runs
"""

from __future__ import annotations

import argparse
import importlib.util
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
from tokenizers import Tokenizer

from benchmarks.random_checkpoint import make_random_checkpoint

ROOT = Path(__file__).resolve().parent.parent
PLAIN = ("bf16", "fp16", "fp32")
FORMATS = ("bf16", "int8", "fp8", "int4", "mxfp4", "nvfp4")
#: What llama.cpp calls formats of equal bits: 4.5 a weight both of 4, 8.5 beside int8's 8.125.
LLAMA_BITS = {"bf16": ("bf16",), "int8": ("q8_0",), "int4": ("q4_0", "q4_k")}
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
    "intermediate_size": 256,  # a multiple of q4_k's blocks
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


def missing_peers() -> list[str]:
    """What of the extra `peers` is not installed."""
    return [name for name in ("gguf", "llama_cpp") if importlib.util.find_spec(name) is None]


def run_llama(gguf: Path, prompt: list[int], args: argparse.Namespace) -> Any:
    """The answer of `benchmarks.llama_process`: one text of llama.cpp, in a process of its own."""
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.llama_process", "generate", str(gguf),
            "--prompt", *map(str, prompt), "--tokens", str(args.tokens),
            "--threads", str(args.threads), *args.llama_flags.split(),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"end_to_end: {gguf.name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def llama_files(model: Path, expert_dtype: str) -> dict[str, Path]:
    """The model in llama.cpp's formats of equal bits, beside its folder; made where missing."""
    from benchmarks.gguf_checkpoint import gguf_file

    return {bits: gguf_file(model, bits) for bits in LLAMA_BITS.get(expert_dtype.split("-")[0], ())}


def llama_rows(
    files: dict[str, Path], runs: dict[str, list[Any]], headrace: list[float]
) -> list[dict[str, Any]]:
    """A row for each of llama.cpp's formats, from its runs, each beside one of headrace's."""
    from benchmarks.gguf_checkpoint import bytes_per_token

    rows = []
    for bits, answers in runs.items():
        rates = [answer["tokens_per_s"] for answer in answers]
        token_bytes = bytes_per_token(files[bits])
        rate = statistics.median(rates)
        rows.append(
            {
                "program": "llama.cpp",
                "version": answers[0]["version"],
                "expert_dtype": bits,
                "tokens_per_s": rate,
                "rates": rates,
                "gb_per_token": token_bytes / 1e9,
                "gbps": rate * token_bytes / 1e9,
                "headrace_ratio": statistics.median(
                    mine / its for mine, its in zip(headrace, rates, strict=True)
                ),
            }
        )
    return rows


def measure(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    prompt = Tokenizer.from_file(str(model / "tokenizer.json")).encode(PROMPT).ids
    for name in args.formats:
        dense_dtype = name if name not in PLAIN and args.dense == "same" else "auto"
        sizes = plan(model, name, dense_dtype)
        active_bytes = sizes["num_layers"] * sizes["top_k"] * sizes["expert_bytes"]
        files = llama_files(model, name) if args.llama else {}
        runs: list[Any] = []
        llama_runs: dict[str, list[Any]] = {bits: [] for bits in files}
        for _ in range(args.repeat):
            runs.append(run_headrace(model, name, dense_dtype, args.tokens, args.flags.split()))
            for bits, file in files.items():
                llama_runs[bits].append(run_llama(file, prompt, args))
        rates = [run["tokens_per_s"] for run in runs]
        rate = statistics.median(rates)
        token_bytes = active_bytes + sizes["dense_bytes"]
        rows.append(
            {
                "program": "headrace",
                "expert_dtype": name,
                "dense_dtype": dense_dtype,
                "tokens_per_s": rate,
                "rates": rates,
                "gb_per_token": token_bytes / 1e9,
                "gbps": rate * token_bytes / 1e9,
                "store_gb": sizes["store_bytes"] / 1e9,
                "hits": runs[0]["hits"],
                "fills": runs[0]["fills"],
                "cpu_experts": runs[0]["cpu_experts"],
            }
        )
        if files:
            rows += llama_rows(files, llama_runs, rates)
    if not args.skip_transformers:
        rate = run_transformers(model, args.tokens, args.threads)
        rows.append({"program": "transformers", "expert_dtype": "bf16", "tokens_per_s": rate})
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
    parser.add_argument("--repeat", type=int, default=1, help="runs of each program, medians")
    parser.add_argument("--threads", type=int, default=2, help="of the other programs")
    parser.add_argument(
        "--flags",
        default="--slots 1 --fill none",
        metavar="TEXT",
        help="of `headrace generate`, in quotes (default: %(default)s: the CPU runs all experts)",
    )
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--llama", action="store_true", help="llama.cpp too, at equal bits")
    parser.add_argument(
        "--llama-flags", default="", metavar="TEXT", help="of benchmarks.llama_process generate"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if args.llama and missing_peers():
        print(
            f"llama.cpp: skipped, {' and '.join(missing_peers())} not installed: "
            "pip install 'headrace[peers]'",
            file=sys.stderr,
        )
        args.llama = False
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if not (model / "config.json").is_file():
            make_random_checkpoint(model, **(QUICK_SHAPE if args.quick else SHAPE))
        rows = measure(args, model)
    if args.json:
        print(json.dumps({"prompt": len(PROMPT), "tokens": args.tokens, "rows": rows}, indent=2))
        return 0
    table = Table("program", "experts", "tok/s", "GB/token", "GB/s", "headrace")
    shown = ("tokens_per_s", "gb_per_token", "gbps", "headrace_ratio")
    for row in rows:
        figures = [f"{row[name]:.2f}" if name in row else "" for name in shown]
        table.add_row(row["program"], row["expert_dtype"], *figures)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
