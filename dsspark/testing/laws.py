"""The exact law of a sampler, without Monte Carlo: one door to what the modules beside it hold.

- On a grid: `GridLaw`, `lattice`, `exact_law`, `assert_exact`: integer counts over every combination of uniforms, for one or
  several requests, with the scheduler inside, for one or several rounds. `composed_law` composes rounds too large to enumerate.
- On any vocabulary: `law_error` bisects every threshold and breakpoint to the last float32 bit.
- For what cannot be enumerated: `g_test`, beside an exact check, never instead of one.
"""

from dsspark.testing.bisection import EPS, TOP, LawError, first_true, law_error
from dsspark.testing.enumeration import (
    Comparison,
    Counts,
    assert_exact,
    compare,
    composed_law,
    exact_law,
    first_token_law,
    is_exact,
)
from dsspark.testing.errors import LosslessnessError
from dsspark.testing.grid import GridLaw, Lattice, LatticeSizes, lattice, lattice_sizes, two_level_sizes
from dsspark.testing.gtest import GTest, g_test
from dsspark.testing.rounds import Stages, grid_round

__all__ = [
    "EPS",
    "TOP",
    "Comparison",
    "Counts",
    "GTest",
    "GridLaw",
    "Lattice",
    "LatticeSizes",
    "LawError",
    "LosslessnessError",
    "Stages",
    "assert_exact",
    "compare",
    "composed_law",
    "exact_law",
    "first_token_law",
    "first_true",
    "g_test",
    "grid_round",
    "is_exact",
    "lattice",
    "lattice_sizes",
    "law_error",
    "two_level_sizes",
]
