"""Record rounds of the shipped drafter on held-out prompts, for `python -m dsspark simulate --traces FILE`.

    python benchmarks/record_traces.py FILE [--prompts 12] [--tokens 160]

Every round verifies its whole block, so what each shorter length would have accepted is known too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dsspark.decoding import RoundReport, generate
from dsspark.models.pretrained import load_pretrained
from dsspark.models.target import BOS_ID
from dsspark.training.corpus import DOMAINS, held_out_prompts


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=12, help="of each domain (default 12)")
    parser.add_argument("--tokens", type=int, default=160, help="to decode after each (default 160)")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    target, drafter, _ = load_pretrained()
    rounds = {}
    for domain in DOMAINS:
        survivals, accepted = [], []

        def keep(report: RoundReport, survivals: list = survivals, accepted: list = accepted) -> None:
            survivals.append(report.survival)
            accepted.append(report.verification.num_accepted)

        prompts = [[BOS_ID, *document.prompt] for document in held_out_prompts(domain, args.prompts)]
        generate(target, drafter, prompts, args.tokens, args.temperature, on_round=keep)
        rounds[domain] = {
            # Rounded to 4 digits along the row, which cannot make it rise.
            "survival": [[round(a, 4) for a in row] for row in torch.cat(survivals).tolist()],
            "accepted": torch.cat(accepted).tolist(),
        }
        print(domain, len(rounds[domain]["accepted"]), "rounds")
    facts = {
        "models": "shipped",
        "temperature": args.temperature,
        "prompts": args.prompts,
        "tokens": args.tokens,
        "torch": torch.__version__,
    }
    args.file.write_text(
        json.dumps({"rounds": rounds, "provenance": facts}, separators=(",", ":")) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
