"""`python -m dsspark.distributed`: bytes on the wire per round, beside an all-gather of logits."""

from __future__ import annotations

import argparse
import sys

from dsspark.distributed.traffic import add_arguments, run

parser = argparse.ArgumentParser(prog="python -m dsspark.distributed", description=__doc__)
add_arguments(parser)
try:
    sys.exit(run(parser.parse_args()))
except ValueError as error:
    parser.error(str(error))
