"""Train the demo checkpoint ``models/demo`` on two CPU cores, from text any machine has.

The result is a Hugging Face directory (config, safetensors, tokenizer, generation config, card):
Qwen3-MoE, 8 layers of 24 experts, 4 a token, 11 MB in bfloat16.  It is trained in float32 under a
wall-clock budget: start from bigram embeddings, warm up, hold, then anneal to zero, so that
whatever the budget, the last step is the best one.

Two auxiliary losses shape the routing.  One balances the experts over a batch, so that none dies.
The other asks each router to put its mass on the experts that the previous token used, with a
weight steered so that neighbours share about ``--overlap`` of their experts: enough for a cache of
experts to be worth having, at little cost in bits per byte.

Examples::

    python models/train_demo.py --minutes 50 --docs /usr/share/doc/python3.11/html/_sources
    python models/train_demo.py --resume                  # carry on from the last checkpoint
    python models/train_demo.py --evaluate models/demo    # rewrite eval.json and the card
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from demo_bigram import bigram_embeddings
from demo_card import write_card
from demo_corpus import Document, training_documents
from demo_eval import beaten, evaluate
from demo_model import CONTEXT, ParallelStep, StepLosses, demo_config, initial_model
from demo_optimiser import Optimiser
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = HERE / "demo_chat.jinja"
END = "<|endoftext|>"
END_ID = 0
"""The trainer of the tokenizer numbers its special tokens first."""
VOCABULARY = 4096
BALANCE_WEIGHT = 1.0
WARM_UP_STEPS = 10
HOLD = 0.3
"""Share of the budget at the peak rate, before the anneal begins."""
LONG_PHASE = 0.85
"""Share of the budget after which sequences are twice as long."""

_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""glibc keeps freed memory (page faults otherwise halve the speed); idle threads yield the core."""


@dataclass
class State:
    """Where a run stands: ``seconds`` of budget spent, ``steps`` and ``tokens`` done."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    sticky_weight: float = 0.03
    tokens_in_corpus: int = 0
    bytes_in_corpus: int = 0


def restart_with_allocator() -> None:
    """Re-execute this script once with the allocator settings, which glibc reads at start."""
    if sys.platform == "linux" and "MALLOC_TOP_PAD_" not in os.environ:
        os.environ.update(_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Byte-level BPE of 4096 entries, learnt from the training documents alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[Document]) -> Tensor:
    """All documents as one int32 stream, each preceded by the end-of-text token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        ids.append(END_ID)
        ids += encoding.ids
    return torch.tensor(ids, dtype=torch.int32)


def batches(stream: Tensor, tokens: int, seed: int, done: int) -> Iterator[Tensor]:
    """Endless [tokens, ...] draws of 513-token windows in a seeded order, ``done`` tokens in.

    Yields int64 [tokens / 512, 513]; each epoch shifts the windows and shuffles them anew.
    """
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed + epoch)
        shift = int(torch.randint(512, (1,), generator=generator))
        starts = torch.arange(shift, len(stream) - 513, 512)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for chunk in starts.split(tokens // 512):
            if done > 0:
                done -= tokens
            elif len(chunk) == tokens // 512:
                yield torch.stack([stream[s : s + 513] for s in chunk.tolist()]).long()
        epoch += 1


def rate_scale(state: State, share: float) -> float:
    """Learning rate over its peak, given the ``share`` (0 to 1) of the budget spent."""
    warm = min(1.0, (state.steps + 1) / WARM_UP_STEPS)
    return warm * min(1.0, max(0.0, (1 - share) / (1 - HOLD)))


def export(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a complete bfloat16 Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    half = Qwen3MoeForCausalLM(model.config).bfloat16()
    half.load_state_dict(model.state_dict())
    half.config.dtype = torch.bfloat16
    half.generation_config = GenerationConfig(
        bos_token_id=END_ID, eos_token_id=END_ID, do_sample=True, temperature=0.7, top_p=0.95
    )
    half.save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    config = json.loads((out / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts", model.config.num_experts)
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        (out / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(CHAT_TEMPLATE, out / "chat_template.jinja")
    for path in out.iterdir():
        path.chmod(0o644)


def save_checkpoint(
    work: Path, model: Qwen3MoeForCausalLM, optimiser: Optimiser, state: State
) -> None:
    """Write weights, optimiser state and progress to ``work``, each by an atomic rename."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, tensors in (("weights", weights), ("optimiser", optimiser.state())):
        save_file({k: v.contiguous() for k, v in tensors.items()}, work / f"{name}.part")
        (work / f"{name}.part").replace(work / f"{name}.safetensors")
    (work / "state.part").write_text(json.dumps(asdict(state)))
    (work / "state.part").replace(work / "state.json")


def load_checkpoint(work: Path, model: Qwen3MoeForCausalLM, optimiser: Optimiser) -> State:
    """Restore what :func:`save_checkpoint` wrote."""
    weights = load_file(work / "weights.safetensors")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    optimiser.load(load_file(work / "optimiser.safetensors"))
    return State(**json.loads((work / "state.json").read_text()))


def steer(state: State, overlap: float, target: float) -> None:
    """Move the stickiness weight towards the target overlap, a few per cent a step."""
    factor = math.exp(0.1 * (target - overlap))
    state.sticky_weight = min(0.5, max(0.005, state.sticky_weight * factor))


def report(losses: StepLosses, state: State, rate: float) -> str:
    """One line of progress."""
    return (
        f"step {state.steps} {state.seconds / 60:.1f} min  loss {float(losses.text):.3f} nats  "
        f"overlap {losses.overlap:.1%} (weight {state.sticky_weight:.3f})  "
        f"load {losses.idlest:.2f}-{losses.busiest:.2f}  {rate:,.0f} tok/s"
    )


def train(args: argparse.Namespace, console: Console) -> None:
    """Run the whole recipe: corpus, tokenizer, training, export."""
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    cache = args.work / "stream.safetensors"
    if args.resume and cache.exists():
        tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
        saved = load_file(cache)
        stream, size = saved["stream"], int(saved["bytes"])
    else:
        documents = training_documents(args.docs)
        size = sum(len(document.data) for document in documents)
        tokenizer = train_tokenizer(documents)
        tokenizer.save(str(args.work / "tokenizer.json"))
        stream = encode(tokenizer, documents)
        save_file({"stream": stream, "bytes": torch.tensor(size)}, cache)
    console.print(
        f"corpus: {size / 1e6:.1f} MB, {len(stream):,} tokens "
        f"({size / len(stream):.2f} bytes a token)"
    )
    config = demo_config(VOCABULARY, END_ID)
    bigram = args.work / "bigram.safetensors"
    if not (args.resume and bigram.exists()):
        embedding, head, loss = bigram_embeddings(stream, VOCABULARY, config.hidden_size)
        console.print(f"bigram embeddings: {loss:.3f} nats a token")
        save_file({"embedding": embedding, "head": head}, bigram)
    model = initial_model(config, **load_file(bigram))
    optimiser = Optimiser(model)
    step = ParallelStep(model, args.threads, parts=args.threads)
    state = State(tokens_in_corpus=len(stream), bytes_in_corpus=size)
    if args.resume and (args.work / "state.json").exists():
        state = load_checkpoint(args.work, model, optimiser)
    feed = batches(stream, args.batch, args.seed, state.tokens)
    budget = args.minutes * 60
    saved_at = exported_at = state.seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=budget, completed=state.seconds)
        while state.seconds < budget:
            began = time.monotonic()
            share = state.seconds / budget
            tokens = next(feed)
            if share < LONG_PHASE:
                tokens = torch.cat((tokens[:, :257], tokens[:, 256:]))
            optimiser.zero_grad()
            losses = step(tokens, BALANCE_WEIGHT, state.sticky_weight)
            optimiser.step(rate_scale(state, share))
            steer(state, losses.overlap, args.overlap)
            state.steps += 1
            state.tokens += args.batch
            spent = time.monotonic() - began
            state.seconds += spent
            progress.update(task, completed=state.seconds)
            if state.steps % 20 == 0:
                console.print(report(losses, state, args.batch / spent))
            if state.seconds - saved_at > 240:
                save_checkpoint(args.work, model, optimiser, state)
                saved_at = state.seconds
            if args.preview and state.seconds - exported_at > args.preview_minutes * 60:
                export(model, tokenizer, args.preview)
                exported_at = state.seconds
    save_checkpoint(args.work, model, optimiser, state)
    export(model, tokenizer, args.out)
    (args.out / "training.json").write_text(
        json.dumps(
            asdict(state)
            | {
                "seed": args.seed,
                "batch_tokens": args.batch,
                "target_overlap": args.overlap,
                "balance_weight": BALANCE_WEIGHT,
                "warm_up_steps": WARM_UP_STEPS,
                "hold": HOLD,
                "docs": args.docs is not None,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"wrote {args.out} after {state.tokens:,} tokens in {state.seconds / 60:.1f} min")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--evaluate",
        metavar="DIR",
        type=Path,
        help="do not train: score DIR on the held-out files beside xz -9, measure routing "
        "locality, rewrite its eval.json and README.md",
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "demo", help="where the checkpoint goes (models/demo)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=50,
        help="wall-clock budget of training itself; the anneal ends with it (50)",
    )
    parser.add_argument(
        "--docs",
        metavar="DIR",
        type=Path,
        help="reStructuredText pages to add, such as python3-doc's html/_sources; "
        "training and scoring work without it",
    )
    parser.add_argument(
        "--resume", action="store_true", help="carry on from the checkpoint in --work"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/train-demo"),
        help="checkpoints, written every four minutes (build/train-demo)",
    )
    parser.add_argument(
        "--preview", metavar="DIR", type=Path, help="also export the unfinished model here"
    )
    parser.add_argument(
        "--preview-minutes", type=float, default=8, help="how often to export it (8)"
    )
    parser.add_argument("--batch", type=int, default=2048, help="tokens a step (2048)")
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.5,
        help="share of experts that neighbouring tokens should have in common; chance is 0.167 "
        "(0.5)",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (2)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data order (1)")
    return parser.parse_args(argv)


def main() -> None:
    """Train, then score; or only score with ``--evaluate``."""
    args = parse()
    restart_with_allocator()
    console = Console(width=None if sys.stdout.isatty() else 150)
    torch.set_num_threads(args.threads)
    if args.evaluate is None:
        train(args, console)
    target = args.evaluate or args.out
    figures = evaluate(target, args.docs, console)
    write_card(target)
    if beaten(figures):
        raise SystemExit(f"xz -9 beats the model on: {', '.join(beaten(figures))}")


if __name__ == "__main__":
    main()
