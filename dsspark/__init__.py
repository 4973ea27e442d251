"""DSpark speculative decoding: readable references, Triton kernels, and a losslessness that is checked by running it.

import dsspark

block = dsspark.draft_block(base_logits, anchors, head, uniforms)
batch = dsspark.pack(anchors, block.tokens, lengths, start_positions)
result = dsspark.verify(target_logits, batch, block, uniforms)
"""

from dsspark._dispatch import dispatched
from dsspark.cost_table import CostTable
from dsspark.models.heads import ConfidenceHead, MarkovHead
from dsspark.numerics import CELL
from dsspark.randomness import Uniforms
from dsspark.reference import calibration as _calibration
from dsspark.reference import confidence as _confidence
from dsspark.reference import markov as _markov
from dsspark.reference import rejection as _rejection
from dsspark.reference import scheduler as _scheduler
from dsspark.reference import verification as _verification
from dsspark.serving.delayed import DelayedScheduler
from dsspark.types import DraftBlock, Filters, PackedBatch, STSFit, Verification

draft_block = dispatched(_markov.draft_block)
confidence_logits = dispatched(_confidence.confidence_logits)
survival = dispatched(_confidence.survival)
fit_sts = dispatched(_calibration.fit_sts)
expected_calibration_error = dispatched(_calibration.expected_calibration_error)
schedule = dispatched(_scheduler.schedule)
plan_budget = dispatched(_scheduler.plan_budget)
admit = dispatched(_scheduler.admit)
pack = dispatched(_verification.pack)
ragged_attention = dispatched(_verification.ragged_attention)
verify = dispatched(_rejection.verify)

__version__ = "0.1.0"

__all__ = [
    "CELL",
    "ConfidenceHead",
    "CostTable",
    "DelayedScheduler",
    "DraftBlock",
    "Filters",
    "MarkovHead",
    "PackedBatch",
    "STSFit",
    "Uniforms",
    "Verification",
    "admit",
    "confidence_logits",
    "draft_block",
    "expected_calibration_error",
    "fit_sts",
    "pack",
    "plan_budget",
    "ragged_attention",
    "schedule",
    "survival",
    "verify",
]
