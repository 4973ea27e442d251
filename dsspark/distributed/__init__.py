"""DSpark over a vocabulary that is sharded across ranks (tensor parallelism), on `torch.distributed`.

W2 and the base and target logits stay where they are: ranks exchange row maxima, masses of cells and drawn tokens, never a row of
logits. Every rank gets the same tokens, and they are those of a run on a single rank.
"""

from dsspark.distributed.collectives import Message, Traffic, count_traffic
from dsspark.distributed.drafting import ShardedDraft, draft_block_parallel
from dsspark.distributed.partition import VocabularyShard
from dsspark.distributed.scheduling import (
    admit_parallel,
    check_agreement,
    decide_once,
    plan_budget_parallel,
    schedule_parallel,
    survival_parallel,
)
from dsspark.distributed.verification import verify_parallel

__all__ = [
    "Message",
    "ShardedDraft",
    "Traffic",
    "VocabularyShard",
    "admit_parallel",
    "check_agreement",
    "count_traffic",
    "decide_once",
    "draft_block_parallel",
    "plan_budget_parallel",
    "schedule_parallel",
    "survival_parallel",
    "verify_parallel",
]
