"""The model card of the demo checkpoint, written from its ``eval.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from demo_eval import beaten

if TYPE_CHECKING:
    from pathlib import Path

_HEAD = """---
license: apache-2.0
language:
- en
- code
library_name: transformers
pipeline_tag: text-generation
tags:
- qwen3_moe
- mixture-of-experts
- demo
---

# Headrace demo checkpoint

A small, trained mixture-of-experts language model of Python source and English documentation.  It
exists so that Headrace's demos, benchmarks and tests have a checkpoint with real text and real
routing in a clone.  Qwen3-MoE architecture: 8 layers, 24 experts a layer, 4 a token (weights
renormalised), hidden size 128, expert width 64, 4 query heads and 2 key-value heads of 32,
untied embeddings, byte-level BPE of 4,096 entries.  {parameters:.1f} M parameters, {active:.1f} M
active a token (the embedding table counted whole); {size:.1f} MB of bfloat16 safetensors.

## Data

{size_mb:.1f} MB of text ({corpus_tokens:,} tokens), nothing downloaded:

- the running Python's standard library: module sources without data tables; docstrings of 160
  characters and more once again as prose; the language reference pages that
  `pydoc_data/topics.py` carries; at most 1 MB of its unit tests;
- {docs_line}

The files listed under Figures were never trained on, nor were copies of them, their docstrings,
their unit tests or their pages of the library reference.  Other modules and pages still mention
them, as they do in any project.

## Licence

The training data is Copyright (c) 2001 Python Software Foundation, all rights reserved, under the
[PSF License Version 2](https://docs.python.org/3/license.html); parts of the standard library
carry their own notices, collected on the same page.  The weights, tokenizer and trainer are under
Headrace's licence, Apache-2.0.

## Recipe

Embedding and output head start as a bigram model: the corpus's table of neighbouring tokens,
factorised to rank 128 and fitted through the network's own read-out.  Attention and experts start
with zero outputs.  Then `models/train_demo.py` trained {minutes:.1f} minutes on 2 CPU cores (x86-64
with AVX2, float32, shared with other work): {steps:,} steps, {tokens:,} tokens, {epochs:.2f} of an
epoch, {rate:,.0f} tokens/s on average.  Sequences of 256 tokens, of 512 in the last 15 % of the
time.  Muon for the projections, AdamW for embeddings, routers and norms; {warm} steps of warm-up,
constant rate until {hold:.0%} of the budget, then linearly to zero.  Cross-entropy, plus a
load-balance loss at weight {balance:g}, plus a loss that rewards router mass on the previous
token's experts, its weight steered towards {target:.0%} overlap (it ended at {sticky:.3f}).

To train it again (no download, no GPU; leave `--docs` out where `python3-doc` is missing):

```sh
python models/train_demo.py --minutes 50 --docs /usr/share/doc/python3.11/html/_sources
python models/train_demo.py --evaluate models/demo    # only recompute the figures
```

## Figures

Bits per byte of whole held-out files, lower is better.  Model: the bfloat16 weights in this
directory, float32 arithmetic, a window of 512 tokens sliding by 384, every byte counted once.
`xz -9`: the same single file; "raw" leaves out the container.  A compressor starts from nothing
and a model from its training, so this shows that the model has learnt, not that it is a better
compressor.

| held-out file | bytes | model | xz -9 | xz -9 raw |
|---|--:|--:|--:|--:|
"""

_TAIL = """
Routing on the same files ({routed:,} tokens, {layers} layers):

| | measured | uniform random routing |
|---|--:|--:|
| experts shared with the previous token | {overlap:.1%} | {overlap_chance:.1%} |
| LRU hit rate, cache of 25 % of all experts | {lru25:.1%} | {lru25_chance:.1%} |
| LRU hit rate, cache of 50 % of all experts | {lru50:.1%} | {lru50_chance:.1%} |

The cache is one LRU over all (layer, expert) pairs, files decoded one after another.  Overlap by
layer, first to last: {by_layer}.  Expert load over its layer's mean: {low:.2f} to {high:.2f}.
The locality was trained for; a large checkpoint's is its own, and these hit rates say nothing
about it.

## What it writes

100 tokens after `{prompt}`, greedy:

```
{greedy}
```

At temperature 0.7:

```
{warm}
```

## Limits

Locally coherent text that looks like Python or its documentation, and no more: it does not answer
questions, the code it writes rarely runs, and it may repeat passages of its training data.  It
never saw sequences above 512 tokens, though `max_position_embeddings` is 2,048.  Not for use in
any product.
"""


def write_card(path: Path) -> None:
    """Write ``path/README.md`` from ``path/eval.json``."""
    figures: dict[str, Any] = json.loads((path / "eval.json").read_text())
    checkpoint, training, routing = figures["checkpoint"], figures["training"], figures["routing"]
    docs = "the reStructuredText pages of Debian's `python3-doc`, without the changelog."
    head = _HEAD.format(
        parameters=checkpoint["parameters"] / 1e6,
        active=checkpoint["parameters_active"] / 1e6,
        size=checkpoint["bytes"] / 1e6,
        size_mb=training["bytes_in_corpus"] / 1e6,
        corpus_tokens=training["tokens_in_corpus"],
        docs_line=docs if training["docs"] else "no further documentation (`--docs` not given).",
        minutes=training["seconds"] / 60,
        steps=training["steps"],
        tokens=training["tokens"],
        epochs=training["tokens"] / training["tokens_in_corpus"],
        rate=training["tokens"] / training["seconds"],
        sticky=training["sticky_weight"],
        warm=training["warm_up_steps"],
        hold=training["hold"],
        balance=training["balance_weight"],
        target=training["target_overlap"],
    )
    totals = [
        {"name": f"**all {label}**", **figures["totals"][key]}
        for key, label in (("modules", "modules"), ("pages", "pages"), ("all", "files"))
        if key in figures["totals"]
    ]
    rows = "\n".join(
        f"| {row['name']} | {row['bytes']:,} | {row['model_bits_per_byte']:.3f} "
        f"| {row['xz_bits_per_byte']:.3f} | {row['xz_raw_bits_per_byte']:.3f} |"
        for row in figures["files"] + totals
    )
    tail = _TAIL.format(
        routed=routing["tokens"],
        layers=len(routing["adjacent_overlap_by_layer"]),
        overlap=routing["adjacent_overlap"],
        overlap_chance=routing["adjacent_overlap_chance"],
        lru25=routing["lru_hit_rate"]["0.25"],
        lru50=routing["lru_hit_rate"]["0.50"],
        lru25_chance=routing["lru_hit_rate_chance"]["0.25"],
        lru50_chance=routing["lru_hit_rate_chance"]["0.50"],
        by_layer=", ".join(f"{share:.0%}" for share in routing["adjacent_overlap_by_layer"]),
        low=routing["expert_load_min"],
        high=routing["expert_load_max"],
        prompt=figures["samples"]["prompt"].strip(),
        greedy=figures["samples"]["greedy"].strip("\n"),
        warm=figures["samples"]["temperature_0.7"].strip("\n"),
    )
    losses = beaten(figures)
    note = (
        f"\nThe model does not beat `xz -9` on {', '.join(losses)}: it needs more training.\n"
        if losses
        else "\nThe model beats `xz -9` on every file.\n"
    )
    (path / "README.md").write_text(head + rows + "\n" + note + tail)
