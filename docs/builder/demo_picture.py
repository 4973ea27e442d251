"""The picture of the demo in the README: `python -m docs.builder.demo_picture` runs it and writes demo.svg and demo.json.

The picture shows the first text and the tables of one real run; demo.json is that run's summary, which the tests compare the README with.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time

import torch
from rich.console import Console

from docs.builder.sources import ROOT
from dsspark.demo import command, terminal
from dsspark.demo.results import Results, summary
from dsspark.models.pretrained import load_pretrained

FOLDER = ROOT / "docs" / "_static"
WIDTH = 96


def picture(results: Results) -> str:
    """Return the legend, the first transcript and the findings as the SVG of a terminal, without fonts from elsewhere."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True, color_system="truecolor"
    )
    console.print(terminal.legend())
    console.print(terminal.transcript_view(results.transcripts[0]))
    console.print(terminal.findings(results))
    svg = console.export_svg(title="make demo")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> int:
    """Run the demo as `make demo` does and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__)
    command.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(command.THREADS)
    console = Console(width=WIDTH, highlight=False)
    results = command.measure_all(load_pretrained(), [], args, command.Effort(), console, time.perf_counter())
    (FOLDER / "demo.svg").write_text(picture(results), encoding="utf-8")
    (FOLDER / "demo.json").write_text(json.dumps(summary(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
