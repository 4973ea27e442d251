"""The command line: `python -m dsspark demo | train | evaluate | experiments | smollm2 | audit | simulate | compile`.

A command's module is imported only when that command is asked for. An error that a user can cause is one line on stderr and exit
status 2; Ctrl-C is 130.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dsspark import __version__

COMMANDS = {
    "demo": ("dsspark.demo.command", "decode real text with the shipped models, measure it, and write report.html"),
    "train": ("dsspark.training.command", "train the target and the drafters again from text that Python ships"),
    "evaluate": ("dsspark.evaluation.command", "measure drafters on held-out text: acceptance, confidence, latency"),
    "experiments": ("dsspark.experiments.command", "train every drafter of the paper at small scale and compare them"),
    "smollm2": ("dsspark.smollm2.command", "train and measure a drafter for a real model, SmolLM2-135M-Instruct"),
    "audit": ("dsspark.testing.command", "check a sampler or a scheduler for losslessness"),
    "simulate": ("dsspark.serving.command", "simulate a serving engine under load, policy by policy"),
    "compile": ("dsspark.kernels.compile", "compile every Triton kernel without a GPU and inspect the result"),
}
"""Each command's module, which offers `add_arguments(parser)` and `run(args)`, and its help."""

EXIT_ERROR, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED = 2, 1, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser(selected: str | None = None) -> argparse.ArgumentParser:
    """Return the parser, with the arguments of the `selected` command only."""
    parser = _Parser(
        prog="dsspark", description="DSpark speculative decoding: reference, kernels, and proof by running."
    )
    parser.add_argument("--version", action="version", version=f"dsspark {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == selected:
            importlib.import_module(module).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for a failed check, 2 for an error of the user's, 130 for Ctrl-C.

    Args:
        argv: the arguments; those of the process if None.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    selected = next((word for word in words if not word.startswith("-")), None)
    show_traceback = "--traceback" in words[: words.index(selected)] if selected is not None else False
    try:
        args = build_parser(selected).parse_args(words)
        status = importlib.import_module(COMMANDS[args.command][0]).run(args)
    except KeyboardInterrupt:
        print("dsspark: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, RuntimeError) as error:
        if show_traceback:
            traceback.print_exc()
        print(f"dsspark: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    return int(status or 0)
