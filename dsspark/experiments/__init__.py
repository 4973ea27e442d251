"""The paper's comparisons at the scale of the shipped target: every drafter trained alike, on the same texts, over several seeds."""
