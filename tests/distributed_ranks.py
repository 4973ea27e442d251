"""What each rank of `test_distributed.py` runs, and the launcher: imports once, forks the ranks of every world size, leaves each rank's
results in a file of the folder it is given."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_cases import CASES, GAMMA, Case, build
from torch import Tensor

import dsspark
from dsspark.distributed import (
    ShardedDraft,
    VocabularyShard,
    admit_parallel,
    check_agreement,
    count_traffic,
    draft_block_parallel,
    plan_budget_parallel,
    schedule_parallel,
    survival_parallel,
    verify_parallel,
)

WORLDS = (1, 2, 4)
DRAFTED = ("tokens", "token_probs", "row_max", "row_sum")
EMITTED = ("num_accepted", "tokens", "num_emitted", "valid", "logprobs")


def run_case(case: Case, shard: VocabularyShard, device: str) -> dict[str, object]:
    """Run a case on this rank; return what it drafted and emitted, on the CPU, and what it put on the wire."""
    round_ = to_device(build(case), device)
    check_agreement(shard, anchors=round_.anchors, accept=round_.uniforms.accept)
    draft_shard = shard
    if round_.draft_to_target is not None:
        draft_shard = shard.of_draft(round_.draft_to_target)
    elif case.draft_vocab is not None:
        draft_shard = dataclasses.replace(shard, bounds=(*shard.bounds[:-1], case.draft_vocab))
    with count_traffic() as traffic:
        draft = draft_block_parallel(
            draft_shard.columns(round_.base),
            round_.anchors,
            None if round_.head is None else draft_shard.shard_head(round_.head),
            round_.uniforms,
            draft_shard,
            temperature=round_.draft_temperature,
            hidden=round_.hidden,
            keep_logits=case.keep_logits,
        )
        drafted = {name: getattr(draft.block, name).cpu() for name in DRAFTED}
        if case.point:
            draft = ShardedDraft.point(round_.reference.tokens, shard)
        if case.doubted:
            draft = dataclasses.replace(
                draft, block=dataclasses.replace(draft.block, token_probs=round_.reference.token_probs)
            )
        result = verify_parallel(
            shard.columns(round_.target_logits),
            round_.batch,
            draft,
            round_.uniforms,
            shard,
            temperature=round_.temperature,
            filters=round_.filters,
        )
    emitted = {name: getattr(result, name).cpu() for name in EMITTED}
    return {"draft": drafted, "result": emitted, "payload": traffic.by_label(), "calls": traffic.calls}


def to_device(value, device: str):
    """Return a dataclass, module or tensor with every tensor on the device."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(
            value, **{f.name: to_device(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    if device == "cpu" or not isinstance(value, (Tensor, torch.nn.Module)):
        return value
    return value.to(device)


def run_decisions(shard: VocabularyShard, device: str) -> dict[str, Tensor]:
    """Decide lengths from survivals that differ a little from rank to rank."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, GAMMA, generator=generator).round() * 2  # full of ties
    logits = (logits + shard.rank * 0.1 * torch.randn(40, GAMMA, generator=generator)).to(device)
    table = dsspark.CostTable.from_points([1, 60, 90, 160], [1.0, 1.1, 1.5, 3.0]).to(device)
    survival = survival_parallel(logits, shard)
    own = dsspark.survival(logits)
    budget = plan_budget_parallel(own, table, shard)
    return {
        "survival": survival,
        "schedule": schedule_parallel(own, table, shard, max_tokens=100),
        "budget": budget,
        "admit": admit_parallel(own, budget, shard),
        "own survival": own,
        "own schedule": dsspark.schedule(own, table, max_tokens=100),
    }


def message_of(function) -> str:
    """Return the message of the ValueError that a function raises, or ""."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def run_errors(shard: VocabularyShard, device: str) -> dict[str, str]:
    """Return the errors that every rank must raise alike."""
    values = torch.arange(3, device=device) + (shard.rank == shard.world_size - 1)
    return {
        "from_size": message_of(lambda: VocabularyShard.from_size(37984, device=device)),
        "split": message_of(lambda: VocabularyShard.split(3, cell=1)),
        "agreement": message_of(lambda: check_agreement(shard, values=values)),
        "adopted": str(VocabularyShard.from_size(37984, cell=32, device=device).bounds),
    }


def run_all(shard_of, device: str) -> dict[str, object]:
    """Run everything on this rank; `shard_of(bounds, cell)` makes its shards."""
    found: dict[str, object] = {case.name: run_case(case, shard_of(case), device) for case in CASES}
    shard = shard_of(CASES[0])
    return found | {"decisions": run_decisions(shard, device), "errors": run_errors(shard, device)}


def run_rank(rank: int, world: int, folder: Path, device: str) -> None:
    """Be one rank: join the group, run everything, leave the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))

    def shard_of(case: Case) -> VocabularyShard:
        return VocabularyShard(bounds=case.bounds(world), rank=rank, cell=case.cell)

    torch.save(run_all(shard_of, device), folder / f"world{world}rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(folder: Path, device: str) -> int:
    """Fork the ranks of every world size, one size after the other; return the exit status."""
    torch.set_num_threads(1)  # no thread may exist before a fork
    for case in CASES:
        build(case)  # once for seven ranks, as the import is
    for world in WORLDS:
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run_rank(rank, world, folder, device)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1]), sys.argv[2]))
