"""Other engines' samplers on our inputs. Whoever is not installed is skipped with a reason; nothing here is imported until asked.

They are timed on what their engine calls per step, on full blocks: probabilities or logits in, accepted tokens out. Their noise is
their own, so a peer is checked by its acceptance: the mean number accepted must be that of the reference within five standard errors.
None of them has been run by us yet: no GPU. The calls follow the packages' public sources of 2025 and 2026, of which
`tests/test_benchmarks_peers.py` has stand-ins with the same signatures. A peer whose call fails, or whose acceptance is another, is left
out of the results, with that as the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import REFERENCE, Case, Contender

Inputs = SimpleNamespace

VLLM = "vllm.v1.sample.rejection_sampler"
VLLM_LOGITS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
FLASHINFER = "flashinfer.sampling"
SGLANG_CHAIN = "sglang.kernels.ops.speculative.reject_sampling"
SGLANG_TREE = ("sglang.kernels.ops.speculative.sampling", "sgl_kernel")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine's sampler.

    Attributes:
        name: the package, and what of it.
        reason: why it cannot run here; None where it can.
        accepted: runs it on a case's inputs and returns the number accepted, [R].
        prepare_inputs: builds what its call takes; not timed, as its engine has it at hand.
        law: whether it keeps the target's law with these inputs; one that does not is not checked, and its row says so.
        renew: gives the inputs other noise, where the noise is among them.
    """

    name: str
    reason: str | None
    accepted: Callable[[Inputs], Tensor]
    prepare_inputs: Callable[[Inputs], Inputs]
    law: bool = True
    renew: Callable[[Inputs], None] = lambda inputs: None

    def prepare(self, case: Case) -> Contender:
        """Return the timed call."""
        inputs = self.prepare_inputs(case.inputs)
        return Contender(run=lambda _: self.accepted(inputs))

    def check(self, case: Case, repeats: int = 32) -> None:
        """Raise `AssertionError` if the mean accepted is not the reference's within five standard errors."""
        inputs = self.prepare_inputs(case.inputs)
        if not self.law:
            self.accepted(inputs)
            return
        theirs = []
        for _ in range(repeats):
            self.renew(inputs)
            theirs.append(self.accepted(inputs))
        ours = torch.cat([_fresh(case) for _ in range(repeats)]).double()
        found = torch.cat(theirs).double()
        error = ((ours.var() + found.var()) / len(ours)).sqrt().clamp(min=1e-3)
        difference = float((ours.mean() - found.mean()).abs())
        assert difference < 5 * float(error), f"{self.name}: mean accepted differs by {difference}"


def _fresh(case: Case) -> Tensor:
    """Return the number accepted by the reference with fresh acceptance noise."""
    x = SimpleNamespace(**vars(case.inputs))
    x.uniforms = replace(x.uniforms, accept=torch.rand_like(x.uniforms.accept))
    accepted: Tensor = case.contenders[REFERENCE].run(x).num_accepted
    return accepted


def _missing(*modules: str) -> str | None:
    """Return why none of these modules can run here."""
    packages = sorted({module.partition(".")[0] for module in modules})
    if not any(importlib.util.find_spec(package) for package in packages):
        return f"{' and '.join(packages)} not installed"
    return None if torch.cuda.is_available() else f"{' and '.join(packages)} need a GPU"


def _found(name: str, *modules: str) -> Callable[..., Any]:
    """Return a function from the first module that has it."""
    failures = []
    for module in modules:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            failures.append(str(error))
        else:
            return function
    raise ImportError(f"{name}: {'; '.join(failures)}")


# ------------------------------------------------------------------------------------------------- probabilities of full blocks


def _probabilities(x: Inputs) -> Inputs:
    """Return float32 laws of both sides and the drafts, as a sampler over probabilities takes them."""
    num_requests, block_size, vocab_size = x.block.logits.shape
    rows = x.target.view(num_requests, block_size + 1, vocab_size)
    return SimpleNamespace(
        target=torch.softmax(rows.float(), dim=-1),
        draft=torch.softmax(x.block.logits.float(), dim=-1),
        tokens=x.block.tokens.to(torch.int32),
        target_logits=rows,
    )


def _flashinfer(x: Inputs) -> Tensor:
    """`chain_speculative_sampling` draws its own noise; the probabilities are its inputs, so softmax is not timed."""
    sample = _found("chain_speculative_sampling", FLASHINFER)
    _, _, emitted = sample(draft_probs=x.draft, draft_token_ids=x.tokens, target_probs=x.target)
    count: Tensor = emitted  # drafts emitted before the first rejection
    return count


# ------------------------------------------------------------------------------------------------------------------------ SGLang


def _sglang_inputs(x: Inputs) -> Inputs:
    """Return a chain written as the tree that SGLang's kernels walk: the anchor, then one child each."""
    y = _probabilities(x)
    num_requests, block = y.target.shape[:2]
    device = y.target.device
    index = torch.arange(num_requests * block, device=device).view(num_requests, block)
    following = torch.arange(1, block + 1, device=device).expand(num_requests, block).clone()
    following[:, -1] = -1
    y.index, y.following, y.sibling = index, following, torch.full_like(following, -1)
    y.candidates = torch.cat((torch.zeros_like(index[:, :1]), y.tokens.long()), dim=1)
    return y


def _sglang_tree_inputs(x: Inputs) -> Inputs:
    y = _sglang_inputs(x)
    y.draft = torch.zeros_like(y.target)
    return y


def _walk(sample: Callable[..., Any], x: Inputs) -> Tensor:
    """Call one of SGLang's samplers, which share one contract, with fresh noise."""
    num_requests, block = x.candidates.shape
    device = x.candidates.device
    count = torch.zeros(num_requests, dtype=torch.int32, device=device)
    sample(
        torch.zeros(num_requests * block, dtype=torch.int32, device=device),
        torch.full((num_requests, block), -1, dtype=torch.int32, device=device),
        count,
        x.candidates,
        x.index,
        x.following,
        x.sibling,
        torch.rand(num_requests, block, device=device),
        torch.rand(num_requests, device=device),
        x.target,
        x.draft,
        1.0,
        1.0,
        True,
    )
    return count


def _sglang_tree(x: Inputs) -> Tensor:
    """`tree_speculative_sampling_target_only`, given q = 0 as its engine gives it: it accepts x with probability p(x)."""
    return _walk(_found("tree_speculative_sampling_target_only", *SGLANG_TREE), x)


def _sglang_chain(x: Inputs) -> Tensor:
    """`chain_speculative_sampling_triton`, given q: what the engine calls where it is told to sample by rejection."""
    return _walk(_found("chain_speculative_sampling_triton", SGLANG_CHAIN), x)


# -------------------------------------------------------------------------------------------------------------------------- vLLM


def _vllm_inputs(x: Inputs) -> Inputs:
    """Return what the V1 `rejection_sample` takes: drafts flattened, a bonus token, sampling metadata."""
    y = _probabilities(x)
    num_requests, block_size, vocab_size = y.draft.shape
    device = y.draft.device
    y.counts = [block_size] * num_requests
    y.offsets = torch.arange(1, num_requests + 1, dtype=torch.int32, device=device) * block_size
    y.flat_tokens, y.flat_draft = y.tokens.flatten(), y.draft.flatten(0, 1)
    y.flat_target = y.target[:, :-1].reshape(-1, vocab_size)
    y.flat_logits = y.target_logits[:, :-1].reshape(-1, vocab_size).float()
    y.bonus = y.target[:, -1].argmax(dim=-1, keepdim=True).to(torch.int32)
    y.metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(num_requests, device=device),
        generators={},
        top_k=None,
        top_p=None,
    )
    y.block_size = block_size
    return y


def _vllm(x: Inputs) -> Tensor:
    """Run `rejection_sample` of vLLM's first model runner; its bonus draw comes before and is not timed.

    Its sixth argument is `target_probs` in older releases, after the softmax, and `target_logits` in newer ones, which is timed with it.
    """
    sample = _found("rejection_sample", VLLM)
    target = x.flat_logits if "target_logits" in inspect.signature(sample).parameters else x.flat_target
    tokens: Tensor = sample(x.flat_tokens, x.counts, x.block_size, x.offsets, x.flat_draft, target, x.bonus, x.metadata)
    # A corrected or bonus token follows the accepted ones; -1 pads.
    return (tokens >= 0).sum(dim=1) - 1


def _vllm_logits_inputs(x: Inputs) -> Inputs:
    """Return what the second model runner's `rejection_sample` takes: logits of both sides, and the packed tokens."""
    num_requests, block_size, _ = x.block.logits.shape
    device = x.target.device
    requests = torch.arange(num_requests, dtype=torch.int32, device=device)
    positions = torch.arange(block_size + 1, dtype=torch.int32, device=device)
    return SimpleNamespace(
        target_logits=x.target,
        draft_logits=x.block.logits,
        draft_sampled=x.batch.tokens.to(torch.int32),  # row i is tested for the token of row i + 1
        cu_num_logits=x.batch.cu_seqlens.to(torch.int32),
        pos=x.batch.positions.to(torch.int64),
        idx_mapping=requests,
        expanded_idx_mapping=requests.repeat_interleave(block_size + 1),
        expanded_local_pos=positions.repeat(num_requests),
        temperature=torch.ones(num_requests, device=device),
        seed=torch.arange(num_requests, dtype=torch.int64, device=device),
        num_speculative_steps=block_size,
    )


def _vllm_logits(x: Inputs) -> Tensor:
    """Run `rejection_sample` of vLLM's second model runner, which reads logits: the nearest to `dsspark.verify`."""
    _, emitted = _found("rejection_sample", VLLM_LOGITS)(**vars(x))
    count: Tensor = emitted - 1
    return count


def _other_seeds(x: Inputs) -> None:
    x.seed += len(x.seed)


def peers_of(task: str) -> list[Peer]:
    """Return the peers of a task, those that cannot run here included."""
    if task != "rejection":
        return []
    return [
        Peer(
            name="vllm rejection_sample, model runner 1",
            reason=_missing(VLLM),
            accepted=_vllm,
            prepare_inputs=_vllm_inputs,
        ),
        Peer(
            name="vllm rejection_sample, model runner 2",
            reason=_missing(VLLM_LOGITS),
            accepted=_vllm_logits,
            prepare_inputs=_vllm_logits_inputs,
            renew=_other_seeds,
        ),
        Peer(
            name="flashinfer chain_speculative_sampling",
            reason=_missing(FLASHINFER),
            accepted=_flashinfer,
            prepare_inputs=_probabilities,
        ),
        Peer(
            name="sglang chain_speculative_sampling_triton",
            reason=_missing(SGLANG_CHAIN),
            accepted=_sglang_chain,
            prepare_inputs=_sglang_inputs,
        ),
        Peer(
            name="sglang tree_speculative_sampling_target_only",
            reason=_missing(*SGLANG_TREE),
            accepted=_sglang_tree,
            prepare_inputs=_sglang_tree_inputs,
            law=False,
        ),
    ]
