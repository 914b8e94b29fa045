"""Figures of the demo checkpoint: bits per byte beside ``xz -9``, and routing locality.

Everything is computed from the saved directory with stock Transformers: bfloat16 weights, float32
arithmetic.  Results go to ``eval.json`` in that directory; ``write_card`` turns them into the
model card.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from demo_corpus import Document, held_out
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import Console

WINDOW, STRIDE = 512, 384
"""Tokens a forward pass sees, and how many of them are new after the first pass."""

SHARES = (0.25, 0.5)
"""Capacities of the simulated cache, as shares of all (layer, expert) slots."""

PROMPT = "def read_lines(path, encoding=None):\n"
"""What the card's samples continue."""


@dataclass
class Score:
    """A document under the model.

    Attributes:
        bits: total code length of its bytes, bits.
        tokens: how many tokens it is.
        routes: int64 [tokens, layers, top_k], the experts each input token used, in order.
    """

    bits: float
    tokens: int
    routes: Tensor


def load(path: Path) -> tuple[Any, Any]:
    """The checkpoint in float32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model.eval(), AutoTokenizer.from_pretrained(path)


@torch.inference_mode()
def score(model: Any, tokenizer: Any, text: str) -> Score:
    """Code length and routing of ``text`` under a sliding window; every byte counts once.

    The text follows one end-of-text token.  After the first window each pass scores only its
    newest ``STRIDE`` tokens, which see at least ``WINDOW - STRIDE`` tokens before them.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([tokenizer.eos_token_id, *ids])
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    bits, routes, done = 0.0, [], 0
    try:
        while done < len(ids):
            start = 0 if done == 0 else done - (WINDOW - STRIDE)
            end = min(start + WINDOW, len(ids))
            fresh = done - start
            chosen.clear()
            logits = model(input_ids=stream[None, start:end], use_cache=False).logits[0, fresh:]
            targets = stream[done + 1 : end + 1]
            loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
            bits += loss.item() / math.log(2)
            routes.append(torch.stack(chosen, 1)[fresh:])
            done = end
    finally:
        for hook in hooks:
            hook.remove()
    return Score(bits, len(ids), torch.cat(routes))


def overlap_by_layer(routes: Tensor) -> list[float]:
    """Share of a token's experts that the token before it used too, a value a layer (0 to 1)."""
    same = routes[1:, :, :, None] == routes[:-1, :, None, :]
    return same.any(-1).float().mean((0, 2)).tolist()


def lru_hits(streams: Iterable[Tensor], slots: int) -> float:
    """Hit rate (0 to 1) of one LRU cache of ``slots`` (layer, expert) entries, started empty.

    Args:
        streams: routes [tokens, layers, top_k], decoded one after another, layer by layer.
        slots: capacity.
    """
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = total = 0
    for routes in streams:
        for token in routes.tolist():
            for layer, experts in enumerate(token):
                for expert in experts:
                    key = (layer, expert)
                    total += 1
                    if key in cache:
                        hits += 1
                        cache.move_to_end(key)
                        continue
                    cache[key] = None
                    if len(cache) > slots:
                        cache.popitem(last=False)
    return hits / total


def xz_bits(data: bytes) -> tuple[int, int]:
    """Bits that ``xz -9`` needs for ``data``: as a file, and without the container."""
    raw = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    whole = lzma.compress(data, preset=9)
    return 8 * len(whole), 8 * len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=raw))


def _totals(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Sums over files, with rates in bits per byte of all their bytes."""
    size = sum(row["bytes"] for row in rows)
    rates = ("model_bits_per_byte", "xz_bits_per_byte", "xz_raw_bits_per_byte")
    weighted = {rate: sum(row[rate] * row["bytes"] for row in rows) / size for rate in rates}
    return {"files": len(rows), "bytes": size} | weighted


def _routing(routes: list[Tensor], experts: int) -> dict[str, Any]:
    """Overlap, balance and cache hit rates over all scored documents."""
    joined = torch.cat(routes)
    tokens, layers, top_k = joined.shape
    shape = (min(tokens, 20_000), layers)
    dice = random.Random(0)
    draws = [[dice.sample(range(experts), top_k) for _ in range(layers)] for _ in range(shape[0])]
    chance = [torch.tensor(draws)]
    loads = torch.stack(
        [joined[:, n].flatten().bincount(minlength=experts) for n in range(layers)]
    ).float()
    loads /= loads.mean(1, keepdim=True)
    slots = {share: round(share * layers * experts) for share in SHARES}
    layer_overlap = overlap_by_layer(joined)
    return {
        "tokens": tokens,
        "adjacent_overlap": sum(layer_overlap) / layers,
        "adjacent_overlap_by_layer": layer_overlap,
        "adjacent_overlap_chance": top_k / experts,
        "expert_load_min": loads.min().item(),
        "expert_load_max": loads.max().item(),
        "lru_hit_rate": {f"{share:.2f}": lru_hits(routes, n) for share, n in slots.items()},
        "lru_hit_rate_chance": {f"{share:.2f}": lru_hits(chance, n) for share, n in slots.items()},
    }


def samples(model: Any, tokenizer: Any) -> dict[str, str]:
    """One hundred tokens after :data:`PROMPT`, greedy and at temperature 0.7 (seed 0)."""
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(PROMPT)["input_ids"]]])
    settings = {"max_new_tokens": 100, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    torch.manual_seed(0)
    greedy = model.generate(ids, do_sample=False, temperature=None, top_p=None, **settings)
    warm = model.generate(ids, do_sample=True, temperature=0.7, top_p=1.0, **settings)
    return {
        "prompt": PROMPT,
        "greedy": tokenizer.decode(greedy[0, ids.shape[1] :]),
        "temperature_0.7": tokenizer.decode(warm[0, ids.shape[1] :]),
    }


def _score_row(document: Document, result: Score) -> dict[str, Any]:
    """One entry of ``files`` in ``eval.json``."""
    size = len(document.data)
    whole, raw = xz_bits(document.data)
    overlaps = overlap_by_layer(result.routes)
    return {
        "name": document.name,
        "sha256": document.sha256,
        "bytes": size,
        "tokens": result.tokens,
        "model_bits_per_byte": result.bits / size,
        "xz_bits_per_byte": whole / size,
        "xz_raw_bits_per_byte": raw / size,
        "adjacent_overlap": sum(overlaps) / len(overlaps),
    }


def beaten(figures: dict[str, Any]) -> list[str]:
    """Names of the held-out files that ``xz -9``, container or not, codes at least as well."""
    xz = ("xz_bits_per_byte", "xz_raw_bits_per_byte")
    return [
        row["name"]
        for row in figures["files"]
        if row["model_bits_per_byte"] >= min(row[key] for key in xz)
    ]


def evaluate(path: Path, docs: Path | None, console: Console) -> dict[str, Any]:
    """Score every held-out file, write ``path/eval.json``, print a table, return the figures."""
    model, tokenizer = load(path)
    config = model.config
    documents = held_out(docs)
    rows, routes = [], []
    for document in track(documents, "scoring held-out files", console=console):
        result = score(model, tokenizer, document.text)
        rows.append(_score_row(document, result))
        routes.append(result.routes)
    parameters = sum(p.numel() for p in model.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    weights = (path / "model.safetensors").read_bytes()
    record = path / "training.json"
    groups = {"modules": "stdlib:", "pages": "docs:", "all": ""}
    members = {k: [r for r in rows if r["name"].startswith(v)] for k, v in groups.items()}
    figures = {
        "checkpoint": {
            "bytes": len(weights),
            "sha256": hashlib.sha256(weights).hexdigest(),
            "parameters": parameters,
            "parameters_active": parameters - idle,
        },
        "method": {"window": WINDOW, "stride": STRIDE, "weights": "bfloat16", "math": "float32"},
        "training": json.loads(record.read_text()) if record.exists() else {},
        "files": rows,
        "totals": {name: _totals(part) for name, part in members.items() if part},
        "routing": _routing(routes, config.num_experts),
        "samples": samples(model, tokenizer),
    }
    (path / "eval.json").write_text(json.dumps(figures, indent=2) + "\n")
    table = Table("held-out file", "bytes", "model", "xz -9", "xz raw", title="bits per byte")
    for row in rows:
        rates = (row["model_bits_per_byte"], row["xz_bits_per_byte"], row["xz_raw_bits_per_byte"])
        table.add_row(row["name"], f"{row['bytes']:,}", *(f"{rate:.3f}" for rate in rates))
    console.print(table)
    console.print_json(data=figures["routing"])
    return figures
