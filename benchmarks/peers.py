"""Other engines' samplers on our inputs. Whoever is not installed is skipped with a reason; nothing here is imported until asked.

They are timed on what their engine calls per step: probabilities (or logits) of full blocks in, accepted tokens out. Their noise is
their own, so a peer is checked by its acceptance: the mean number accepted must be that of the reference within five standard errors.
None of them has been run by us yet: no GPU. The calls follow the packages' public signatures as of the versions named below.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import REFERENCE, Case, Contender


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine's sampler.

    Attributes:
        name: the package, and what of it.
        reason: why it cannot run here; None where it can.
        accepted: runs it on a case's inputs and returns the number accepted, [R].
        prepare_inputs: builds what its call takes; not timed, as its engine has it at hand.
        law: whether it keeps the target's law with these inputs; one that does not is not checked, and its row says so.
    """

    name: str
    reason: str | None
    accepted: Callable[[SimpleNamespace], Tensor]
    prepare_inputs: Callable[[SimpleNamespace], SimpleNamespace]
    law: bool = True

    def prepare(self, case: Case) -> Contender:
        """Return the timed call."""
        inputs = self.prepare_inputs(case.inputs)
        return Contender(run=lambda _: self.accepted(inputs))

    def check(self, case: Case, repeats: int = 32) -> None:
        """Raise `AssertionError` if the mean accepted is not the reference's within five standard errors."""
        if not self.law:
            return
        inputs = self.prepare_inputs(case.inputs)
        ours = torch.cat([_fresh(case) for _ in range(repeats)]).float()
        theirs = torch.cat([self.accepted(inputs) for _ in range(repeats)]).float()
        error = ((ours.var() + theirs.var()) / len(ours)).sqrt().clamp(min=1e-3)
        difference = float((ours.mean() - theirs.mean()).abs())
        assert difference < 5 * float(error), f"{self.name}: mean accepted differs by {difference}"


def _fresh(case: Case) -> Tensor:
    """Return the number accepted by the reference with fresh acceptance noise."""
    from dataclasses import replace

    x = SimpleNamespace(**vars(case.inputs))
    x.uniforms = replace(x.uniforms, accept=torch.rand_like(x.uniforms.accept))
    accepted: Tensor = case.contenders[REFERENCE].run(x).num_accepted
    return accepted


def _missing(module: str) -> str | None:
    """Return why a package cannot run here."""
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return None if torch.cuda.is_available() else f"{module} needs a GPU"


def _probabilities(x: SimpleNamespace) -> SimpleNamespace:
    """Return float32 laws of both sides and the drafts, as a sampler over probabilities takes them."""
    num_requests, block_size, vocab_size = x.block.logits.shape
    return SimpleNamespace(
        target=torch.softmax(x.target.view(num_requests, block_size + 1, vocab_size).float(), dim=-1),
        draft=torch.softmax(x.block.logits.float(), dim=-1),
        tokens=x.block.tokens.to(torch.int32),
        target_logits=x.target.view(num_requests, block_size + 1, vocab_size),
    )


def _flashinfer(x: SimpleNamespace) -> Tensor:
    """`flashinfer.sampling.chain_speculative_sampling` (0.2 and later); the probabilities are its inputs, so softmax is not timed."""
    sampling = importlib.import_module("flashinfer.sampling")
    _, _, emitted = sampling.chain_speculative_sampling(x.draft, x.tokens, x.target)
    count: Tensor = emitted  # drafts emitted before the first rejection
    return count


def _sglang_inputs(x: SimpleNamespace) -> SimpleNamespace:
    """Return a chain written as the tree that SGLang's kernel walks: the anchor, then one child each."""
    y = _probabilities(x)
    num_requests, block = y.target.shape[:2]
    device = y.target.device
    index = torch.arange(num_requests * block, device=device).view(num_requests, block)
    following = torch.arange(1, block + 1, device=device).expand(num_requests, block).clone()
    following[:, -1] = -1
    y.index, y.following, y.sibling = index, following, torch.full_like(following, -1)
    y.candidates = torch.cat((torch.zeros_like(index[:, :1]), y.tokens.long()), dim=1)
    y.no_draft = torch.zeros_like(y.target)
    return y


def _sglang(x: SimpleNamespace) -> Tensor:
    """`sgl_kernel.tree_speculative_sampling_target_only`, given q = 0 as its engine gives it: it accepts x with probability p(x)."""
    sgl_kernel = importlib.import_module("sgl_kernel")
    num_requests, block = x.candidates.shape
    device = x.candidates.device
    predicts = torch.zeros(num_requests * block, dtype=torch.int32, device=device)
    accepted = torch.full((num_requests, block), -1, dtype=torch.int32, device=device)
    count = torch.zeros(num_requests, dtype=torch.int32, device=device)
    sgl_kernel.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=x.candidates,
        retrive_index=x.index,
        retrive_next_token=x.following,
        retrive_next_sibling=x.sibling,
        uniform_samples=torch.rand(num_requests, block, device=device),
        uniform_samples_for_final_sampling=torch.rand(num_requests, device=device),
        target_probs=x.target,
        draft_probs=x.no_draft,
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
    )
    return count


def _vllm_inputs(x: SimpleNamespace) -> SimpleNamespace:
    """Return what `vllm.v1.sample.rejection_sampler.rejection_sample` takes: drafts flattened, a bonus token, sampling metadata."""
    y = _probabilities(x)
    num_requests, block_size, vocab_size = y.draft.shape
    device = y.draft.device
    y.counts = [block_size] * num_requests
    y.offsets = torch.arange(1, num_requests + 1, dtype=torch.int32, device=device) * block_size
    y.flat_tokens, y.flat_draft = y.tokens.flatten(), y.draft.flatten(0, 1)
    y.flat_target = y.target[:, :-1].reshape(-1, vocab_size).contiguous()
    y.bonus = y.target[:, -1].argmax(dim=-1, keepdim=True).to(torch.int32)
    y.metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(num_requests, device=device),
        generators={},
        top_k=None,
        top_p=None,
    )
    y.num_requests, y.block_size = num_requests, block_size
    return y


def _vllm(x: SimpleNamespace) -> Tensor:
    """vLLM's V1 `rejection_sample` on probabilities; its target softmax and its bonus draw come before and are not timed."""
    module = importlib.import_module("vllm.v1.sample.rejection_sampler")
    arguments: tuple[Any, ...] = (x.flat_tokens, x.counts, x.block_size, x.offsets, x.flat_draft, x.flat_target)
    tokens: Tensor = module.rejection_sample(*arguments, x.bonus, x.metadata)
    # A corrected or bonus token follows the accepted ones; -1 pads.
    return (tokens >= 0).sum(dim=1) - 1


def peers_of(task: str) -> list[Peer]:
    """Return the peers of a task, those that cannot run here included."""
    if task != "rejection":
        return []
    return [
        Peer(
            name="vllm rejection_sample",
            reason=_missing("vllm"),
            accepted=_vllm,
            prepare_inputs=_vllm_inputs,
        ),
        Peer(
            name="flashinfer chain_speculative_sampling",
            reason=_missing("flashinfer"),
            accepted=_flashinfer,
            prepare_inputs=_probabilities,
        ),
        Peer(
            name="sgl_kernel tree_speculative_sampling_target_only",
            reason=_missing("sgl_kernel"),
            accepted=_sglang,
            prepare_inputs=_sglang_inputs,
            law=False,
        ),
    ]
