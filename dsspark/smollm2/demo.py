"""`python -m dsspark demo --model smollm2`: real chats, decoded losslessly, and how much faster than plain decoding that is."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.smollm2.drafter import SmolLM2Drafter, load_drafter
from dsspark.smollm2.generation import held_out_chats
from dsspark.smollm2.model import SmolLM2, encode_chat, load_smollm2
from dsspark.smollm2.timing import Costs, Pair, profile_costs, time_pair
from dsspark.training.corpus import DOMAINS

SHIPPED = Path(__file__).resolve().parent.parent / "weights" / "smollm2"
CHATS, QUICK_CHATS = 7, 1


def run(args: argparse.Namespace, out: Path, folder: Path = SHIPPED) -> int:
    """Run the demo and return 0, or 1 if a greedy text differs from the target's own.

    Args:
        args: of `demo`.
        out: an existing folder for summary.json.
        folder: of the drafter.
    """
    smollm2 = load_smollm2()
    drafter, provenance = load_drafter(folder, smollm2.model)
    console = Console(highlight=False, soft_wrap=True)
    found = measure(smollm2, drafter, chats_of(smollm2, args), args, console)
    found["drafter"] = provenance
    (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["texts_differ"] == 0 or args.temperature > 0 else 1


def chats_of(smollm2: SmolLM2, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Return the chats to decode, by domain: the user's prompts, or held-out ones."""
    if args.prompt or args.prompt_file is not None:
        texts = args.prompt or [Path(args.prompt_file).read_text(encoding="utf-8", errors="replace")]
        return {"yours": encode_chat(smollm2.tokenizer, texts)}
    domains = DOMAINS if args.domain is None else (args.domain,)
    count = QUICK_CHATS if args.quick else CHATS
    return {domain: held_out_chats(domain, count, smollm2.tokenizer) for domain in domains}


def measure(
    smollm2: SmolLM2,
    drafter: SmolLM2Drafter,
    chats: dict[str, list[list[int]]],
    args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Profile the machine, decode every chat both ways, show the first of each domain, and return the numbers."""
    target, alone = HuggingFaceTarget(smollm2.model, drafter.target_layer_ids), HuggingFaceTarget(smollm2.model)
    first = next(iter(chats.values()))[0]
    costs = profile_costs(target, alone, drafter, first, repeats=3 if args.quick else 15)
    relative = [second / costs.plain for second in costs.table.seconds.tolist()[1:]]
    console.print(
        f"A plain step takes {1e3 * costs.plain:.1f} ms here; a drafted round that verifies 1, 2, ... tokens takes"
    )
    console.print(f"{', '.join(f'{ratio:.2f}' for ratio in relative)} times as long, the draft included.\n")
    table = Table(
        "chats", "tokens a round", "plain, tokens/s", "drafted, tokens/s", "speed-up, median", "worst", "same text"
    )
    entries: dict[str, Any] = {}
    pairs: list[Pair] = []
    for domain, group in chats.items():
        found = [_pair(target, alone, drafter, costs, chat, i, args, smollm2) for i, chat in enumerate(group)]
        pairs += found
        console.print(f"[bold]{domain}[/]: {smollm2.tokenizer.decode(group[0])!r}", markup=True)
        console.print(f"{smollm2.tokenizer.decode(found[0].text)!r}\n", markup=False)
        entries[domain] = entry = summary(found)
        table.add_row(
            f"{domain} ({len(found)})",
            f"{entry['tokens_per_round']:.2f}",
            f"{entry['plain_tokens_per_second']:.1f}",
            f"{entry['drafted_tokens_per_second']:.1f}",
            f"{entry['median_speedup']:.2f}",
            f"{entry['worst_speedup']:.2f}",
            f"{entry['same_text']} of {len(found)}" if args.temperature == 0 else "same law",
        )
    console.print(table)
    return {
        "temperature": args.temperature,
        "plain_seconds": costs.plain,
        "drafted_seconds": costs.table.seconds.tolist()[1:],
        "domains": entries,
        "texts_differ": sum(not pair.equal for pair in pairs),
    }


def _pair(
    target: HuggingFaceTarget,
    alone: HuggingFaceTarget,
    drafter: SmolLM2Drafter,
    costs: Costs,
    chat: list[int],
    index: int,
    args: argparse.Namespace,
    smollm2: SmolLM2,
) -> Pair:
    return time_pair(
        target,
        alone,
        drafter,
        costs,
        chat,
        args.max_new_tokens,
        smollm2.stop_tokens,
        temperature=args.temperature,
        drafted_first=index % 2 == 1,
        seed=args.seed + index,
    )


def summary(pairs: list[Pair]) -> dict[str, Any]:
    """Return the numbers of a domain's pairs."""
    return {
        "chats": len(pairs),
        "tokens_per_round": sum(pair.tokens for pair in pairs) / sum(pair.rounds for pair in pairs),
        "plain_tokens_per_second": statistics.median(pair.tokens / pair.plain for pair in pairs),
        "drafted_tokens_per_second": statistics.median(pair.tokens / pair.drafted for pair in pairs),
        "median_speedup": statistics.median(pair.ratio for pair in pairs),
        "worst_speedup": min(pair.ratio for pair in pairs),
        "ratios": [round(pair.ratio, 4) for pair in pairs],
        "same_text": sum(pair.equal for pair in pairs),
    }
