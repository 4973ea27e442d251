"""What the kit raises."""

from __future__ import annotations


class LosslessnessError(AssertionError):
    """The emitted text does not have exactly the target's law; the message holds the smallest counterexample found."""
