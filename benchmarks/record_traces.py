"""Record rounds of the shipped drafters on held-out prompts, for `python -m dsspark simulate --traces FILE`.

    python benchmarks/record_traces.py FILE [--drafter parallel_only] [--prompts 12] [--tokens 160]

Every round verifies its whole block, so what each shorter length would have accepted is known too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from dsspark.evaluation.traces import traces_of
from dsspark.models.pretrained import MODELS, load_pretrained
from dsspark.training.corpus import DOMAINS, held_out_prompts
from dsspark.training.evaluate import run_rounds


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--drafter", choices=MODELS[1:], default=MODELS[1], help="whose rounds (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=12, help="of each domain (default 12)")
    parser.add_argument("--tokens", type=int, default=160, help="to decode after each (default 160)")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    models = dict(zip(MODELS, load_pretrained(), strict=True))
    target, drafter = models["target"], models[args.drafter]
    records = {
        domain: run_rounds(
            target,
            drafter,
            held_out_prompts(domain, args.prompts),
            max_new_tokens=args.tokens,
            temperature=args.temperature,
        )
        for domain in DOMAINS
    }
    for domain, record in records.items():
        print(domain, len(record.accepted), "rounds")
    facts = {
        "models": "shipped",
        "drafter": args.drafter,
        "temperature": args.temperature,
        "prompts": args.prompts,
        "tokens": args.tokens,
        "torch": torch.__version__,
    }
    content = {"rounds": traces_of(records, drafter.sts_temperatures), "provenance": facts}
    args.file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
