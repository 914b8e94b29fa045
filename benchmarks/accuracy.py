"""What each format of experts costs in accuracy: the demo model with its experts quantised.

    python -m benchmarks.accuracy                 a table; about a minute
    python -m benchmarks.accuracy --json

For each `--expert-dtype` the checkpoint is loaded as `headrace generate` loads it, and its experts
are computed by the function that workers use; everything else runs in float32, so that only the
experts differ. Columns:

    weights     |w - dequantised| / |w| over all experts
    outputs     |y - exact| / |y exact| of the experts' outputs for rows of the text
    bits/byte   code length of held-out text under the model (2 ** bits/byte: perplexity of a byte)

The first line, experts in float32, is the reference of the same run; the checkpoint is bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expert_kernels.native import make_expert_function
from expert_store.checkpoint import open_checkpoint
from expert_store.loader import Plan, load
from expert_store.segment import create_segment

if TYPE_CHECKING:
    from expert_kernels.native import MaxIsa

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("fp32", "bf16", "int8", "fp8", "int4", "int4-g32-zero", "int4-g64", "nvfp4", "mxfp4")
#: As models/demo_eval.py scores: tokens a pass sees, and how many of them are new.
WINDOW, STRIDE = 512, 384
#: Rows of each expert of which outputs are compared.
_NUM_ROWS = 8
_NAME = "accuracy"


class Experts:
    """The experts of a checkpoint in one format, in place of transformers' own."""

    def __init__(self, model: Path, expert_dtype: str, max_isa: MaxIsa) -> None:
        self._fd = create_segment(_NAME)
        dtype = "auto" if expert_dtype in ("bf16", "fp32") else "float32"
        loaded = load(Plan(open_checkpoint(model), dtype, expert_dtype), self._fd, lambda _: None)
        self.layout, self.errors = loaded.layout, loaded.errors
        self.function = make_expert_function(self.layout, max_isa=max_isa)
        self._blocks: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def close(self) -> None:
        os.close(self._fd)

    def compute(self, layer: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden] of rows x [n, hidden]."""
        tensors = self._blocks.get((layer, expert))
        if tensors is None:
            offset = self.layout.block_offset(layer, expert)
            block = bytearray(os.pread(self._fd, self.layout.block_bytes, offset))
            # Kernels read whole lines of 64 bytes: a tensor of torch's own lies on one.
            tensors = self.function.tensors_of(torch.tensor(block, dtype=torch.uint8))
            self._blocks[layer, expert] = tensors
        return self.function(tensors, x.to(self.function.dtype).contiguous())

    def __call__(
        self, layer: int, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in choices.unique().tolist():
            rows, places = (choices == expert).nonzero(as_tuple=True)
            share = weights[rows, places].float().unsqueeze(1)
            total.index_add_(0, rows, share * self.compute(layer, expert, hidden[rows]))
        return total.to(hidden.dtype)


class Text:
    """Held-out text, and a model that it is scored under."""

    def __init__(self, path: Path, num_files: int) -> None:
        sys.path.insert(0, str(ROOT / "models"))
        from demo_corpus import held_out

        documents = sorted(held_out(None), key=lambda document: len(document.data))
        self._documents = documents[:num_files]
        self.num_bytes = sum(len(document.data) for document in self._documents)
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._experts: Any = None
        modules = [m for m in self._model.modules() if hasattr(m, "is_concatenated")]
        for layer, module in enumerate(modules):
            module.accuracy_layer = layer
        ALL_EXPERTS_FUNCTIONS.register(_NAME, self._run)
        self._model.set_experts_implementation(_NAME)
        #: (layer, expert) -> rows that chose it, of the first pass.
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def bits_per_byte(self, experts: Experts) -> float:
        self._experts = experts
        bits = sum(self._bits(document.text) for document in self._documents)
        return bits / self.num_bytes

    def _run(
        self, module: Any, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        layer = module.accuracy_layer
        for expert in choices.unique().tolist():
            if (layer, expert) not in self.rows:
                rows = (choices == expert).any(1).nonzero()[:_NUM_ROWS, 0]
                self.rows[layer, expert] = hidden[rows].clone()
        return self._experts(layer, hidden, choices, weights)

    def _bits(self, text: str) -> float:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        stream = torch.tensor([self._tokenizer.eos_token_id, *ids])
        bits, done = 0.0, 0
        while done < len(ids):
            start = 0 if done == 0 else done - (WINDOW - STRIDE)
            end = min(start + WINDOW, len(ids))
            logits = self._model(input_ids=stream[None, start:end], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits[done - start :].float(), stream[done + 1 : end + 1], reduction="sum"
            )
            bits += loss.item() / math.log(2)
            done = end
        return bits


def output_error(text: Text, experts: Experts, exact: dict[tuple[int, int], torch.Tensor]) -> float:
    """Relative error over the outputs of all experts that the text has used."""
    error = size = 0.0
    for (layer, expert), expected in exact.items():
        found = experts.compute(layer, expert, text.rows[layer, expert])
        error += float((found - expected).square().sum())
        size += float(expected.square().sum())
    return (error / size) ** 0.5


@torch.inference_mode()
def measure(
    model: Path, formats: list[str], num_files: int, max_isa: MaxIsa
) -> list[dict[str, Any]]:
    text = Text(model, num_files)
    rows: list[dict[str, Any]] = []
    exact: dict[tuple[int, int], torch.Tensor] = {}
    for name in ["fp32", *(name for name in formats if name != "fp32")]:
        experts = Experts(model, name, max_isa)
        try:
            bits = text.bits_per_byte(experts)
            if not exact:
                exact = {key: experts.compute(*key, x) for key, x in text.rows.items()}
            rows.append(
                {
                    "expert_dtype": name,
                    "format": name
                    if experts.layout.weights is None
                    else experts.layout.weights.name,
                    "isa": experts.function.isa,
                    "expert_bytes": experts.layout.expert_bytes,
                    "weight_error": 0.0
                    if experts.errors is None
                    else experts.errors.relative_error,
                    "output_error": output_error(text, experts, exact),
                    "bits_per_byte": bits,
                    "perplexity": 2**bits,
                }
            )
        finally:
            experts.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", metavar="DIR")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="NAME")
    parser.add_argument(
        "--files", type=int, default=3, help="held-out files to score, the shortest first"
    )
    parser.add_argument("--max-isa", default="best", help="as the workers' flag; torch: no kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same sums on every machine
    rows = measure(args.model, args.formats, args.files, args.max_isa)
    if args.json:
        print(json.dumps({"rows": rows}, indent=2))
        return 0
    table = Table("experts", "bytes", "weights", "outputs", "bits/byte", "more", "computed by")
    for row in rows:
        more = row["bits_per_byte"] / rows[0]["bits_per_byte"] - 1
        table.add_row(
            row["format"],
            f"{row['expert_bytes']:,}",
            f"{row['weight_error']:.4f}",
            f"{row['output_error']:.4f}",
            f"{row['bits_per_byte']:.4f}",
            f"{100 * more:+.2f} %",
            row["isa"],
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
