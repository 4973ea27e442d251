"""The components as custom operators, so that `torch.compile(fullgraph=True)` can hold them without looking inside.

A component checks what the host can read and chooses between two bodies; neither is something to trace. While a compiler traces, the
public functions go through the operators of this package instead: tensors in, tensors out, shapes known from shapes. At run time an
operator calls the very function that eager code calls, so the results are the same bits, and "auto" still chooses by the device.
Outside of a compiler nothing here runs.

`confidence_logits` and `survival` can be differentiated through; the other operators are for inference. The operators are registered
as `torch.ops.dsspark.*`; their signatures are not part of the public surface.
"""

from collections.abc import Callable
from typing import Any

from dsspark.ops import confidence, markov, rejection, scheduler, verification

TRACEABLE: dict[str, Callable[..., Any]] = {
    "draft_block": markov.draft_block,
    "confidence_logits": confidence.confidence_logits,
    "survival": confidence.survival,
    "schedule": scheduler.schedule,
    "plan_budget": scheduler.plan_budget,
    "admit": scheduler.admit,
    "pack": verification.pack,
    "ragged_attention": verification.ragged_attention,
    "verify": rejection.verify,
}
"""The traceable form of each public function that has one: the same arguments, results and name."""
