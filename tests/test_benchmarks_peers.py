"""The adapters of other engines' samplers, run against stand-ins with the signatures and the contracts of the real ones.

The real packages need a GPU. A stand-in has the parameters of its original under their names, in their order and with its demands on
shapes, dtypes and layout, and samples by the textbook, so that an argument that is passed wrongly shows as an error or as another
acceptance.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import harness, peers
from benchmarks.sizes import Size
from benchmarks.tasks import TASKS

SIZE = Size(num_requests=24, block_size=3, vocab_size=64, rank=8)
R, GAMMA, V = SIZE.num_requests, SIZE.block_size, SIZE.vocab_size


@pytest.fixture(scope="module")
def case():
    return TASKS["rejection"][1](SIZE, "cpu")


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes a module importable, parents included, with one function in it."""

    def add(name, function, called=None):
        parts = name.split(".")
        for stop in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:stop]))
            module.__path__, module.__spec__ = [], ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, called or function.__name__, function)

    return add


def peer_named(start):
    return next(peer for peer in peers.peers_of("rejection") if peer.name.startswith(start))


def accepted_of(target, draft, tokens, coins):
    """Return how many of each row's tokens are accepted: u q < p, up to the first that is not."""
    p = target.gather(2, tokens[..., None].long())[..., 0]
    q = draft.gather(2, tokens[..., None].long())[..., 0]
    return (coins * q < p).long().cumprod(dim=1).sum(dim=1)


# --- stand-ins -------------------------------------------------------------------------------------------------------


def chain_speculative_sampling(
    draft_probs,
    draft_token_ids,
    target_probs,
    maybe_output_accepted_token_num=None,
    maybe_output_emitted_draft_token_num=None,
    deterministic=True,
    generator=None,
    seed=None,
    offset=None,
):
    """FlashInfer's."""
    assert draft_probs.dtype == target_probs.dtype == torch.float32
    assert draft_token_ids.dtype == torch.int32
    assert draft_probs.shape == (R, GAMMA, V)
    assert target_probs.shape == (R, GAMMA + 1, V)
    emitted = accepted_of(target_probs[:, :-1], draft_probs, draft_token_ids, torch.rand(R, GAMMA)).int()
    independent = torch.full_like(emitted, GAMMA)  # it counts tokens behind a rejection too: not what is wanted
    return torch.zeros(R, GAMMA + 1, dtype=torch.int32), independent, emitted


def sglang_sampler(uses_draft):
    """SGLang's contract: results are written into the first three arguments, candidates begin with the anchor."""

    def sample(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
    ):
        assert predicts.shape == (R * (GAMMA + 1),)
        assert accept_index.shape == candidates.shape == (R, GAMMA + 1)
        assert {predicts.dtype, accept_index.dtype, accept_token_num.dtype} == {torch.int32}
        assert {x.dtype for x in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)} == {torch.int64}
        assert uniform_samples.shape == (R, GAMMA + 1)
        assert uniform_samples_for_final_sampling.shape == (R,)
        assert target_probs.shape == (R, GAMMA + 1, V)
        assert (threshold_single, threshold_acc) == (1.0, 1.0)
        assert retrive_index.flatten().tolist() == list(range(R * (GAMMA + 1)))
        assert retrive_next_token[0].tolist() == [*range(1, GAMMA + 1), -1]
        assert (retrive_next_sibling == -1).all()
        draft = draft_probs[:, :GAMMA] if uses_draft else torch.ones(R, GAMMA, V)
        accept_token_num.copy_(
            accepted_of(target_probs[:, :-1], draft, candidates[:, 1:], uniform_samples[:, :GAMMA]).int()
        )

    return sample


def vllm_sampler(parameter):
    """vLLM's first model runner: `parameter` is what its sixth argument is called and means."""
    source = f"""
def rejection_sample(
    draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, {parameter}, bonus_token_ids,
    sampling_metadata,
):
    return body(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, {parameter},
                bonus_token_ids, sampling_metadata)
"""

    def body(tokens, counts, longest, offsets, draft, target, bonus, metadata):
        assert tokens.shape == (R * GAMMA,)
        assert counts == [GAMMA] * R
        assert longest == GAMMA
        assert offsets.tolist() == [GAMMA * (r + 1) for r in range(R)]
        assert all(x.is_contiguous() for x in (tokens, draft, target, bonus))
        assert draft.shape == target.shape == (R * GAMMA, V)
        assert bonus.shape == (R, 1)
        assert not metadata.all_greedy
        assert metadata.all_random
        assert (metadata.temperature == 1).all()
        assert metadata.generators == {}
        p = target.softmax(dim=-1, dtype=torch.float32) if parameter == "target_logits" else target
        shape = R, GAMMA, V
        count = accepted_of(p.view(shape), draft.view(shape), tokens.view(R, GAMMA), torch.rand(R, GAMMA))
        out = torch.full((R, GAMMA + 1), -1, dtype=torch.int32)
        out[torch.arange(GAMMA + 1) <= count[:, None]] = 5
        return out

    names = {"body": body}
    exec(source, names)
    return names["rejection_sample"]


def rejection_sample(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    seed,
    num_speculative_steps,
    synthetic_conditional_rates=None,
    use_fp64=False,
    use_block_verification=False,
):
    """vLLM's second model runner: logits in, and its noise is a function of seed and position alone."""
    assert target_logits.shape == (R * (GAMMA + 1), V)
    assert draft_logits.shape == (R, GAMMA, V)
    assert draft_sampled.shape == pos.shape == expanded_idx_mapping.shape == expanded_local_pos.shape == (len(pos),)
    assert cu_num_logits.tolist() == [(GAMMA + 1) * r for r in range(R + 1)]
    assert idx_mapping.tolist() == list(range(R))
    assert expanded_idx_mapping.view(R, -1).tolist() == [[r] * (GAMMA + 1) for r in range(R)]
    assert expanded_local_pos.view(R, -1).tolist() == [list(range(GAMMA + 1))] * R
    assert (temperature == 1).all()
    assert num_speculative_steps == GAMMA
    tokens = draft_sampled.view(R, GAMMA + 1)[:, 1:]
    generator = torch.Generator().manual_seed(int(seed[0]))
    p = target_logits.view(R, GAMMA + 1, V)[:, :-1].softmax(dim=-1)
    count = accepted_of(p, draft_logits.softmax(dim=-1), tokens, torch.rand(R, GAMMA, generator=generator))
    return torch.zeros(R, GAMMA + 1, dtype=torch.int64), (count + 1).int()


# --- the adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameter", ["target_probs", "target_logits"])
def test_vllm_with_probabilities_and_with_logits(case, install, parameter):
    install(peers.VLLM, vllm_sampler(parameter))
    peer_named("vllm rejection_sample, model runner 1").check(case)


def test_vllm_with_logits_of_both_sides(case, install):
    install(peers.VLLM_LOGITS, rejection_sample)
    peer_named("vllm rejection_sample, model runner 2").check(case)


def test_flashinfer(case, install):
    install(peers.FLASHINFER, chain_speculative_sampling)
    peer_named("flashinfer").check(case)


def test_sglang_chain(case, install):
    install(peers.SGLANG_CHAIN, sglang_sampler(uses_draft=True), called="chain_speculative_sampling_triton")
    peer_named("sglang chain").check(case)


@pytest.mark.parametrize("module", peers.SGLANG_TREE)
def test_sglang_tree_where_either_package_has_it(case, install, module):
    install(module, sglang_sampler(uses_draft=False), called="tree_speculative_sampling_target_only")
    peer = peer_named("sglang tree")
    peer.check(case)
    accepted = torch.cat([peer.prepare(case).run(case.inputs) for _ in range(8)]).float().mean()
    assert accepted < case.facts["mean_accepted"]  # p(x), not min(1, p(x) / q(x)): why it is not held to the law


def test_another_meaning_of_an_argument_is_seen(case, install):
    """A sampler that takes the logits it is given for probabilities accepts another number."""

    def sharper(**x):
        return rejection_sample(**{**x, "target_logits": 3 * x["target_logits"]})

    install(peers.VLLM_LOGITS, sharper, called="rejection_sample")
    with pytest.raises(AssertionError, match="mean accepted"):
        peer_named("vllm rejection_sample, model runner 2").check(case)


def test_frozen_noise_is_seen(case, install):
    """Without other seeds every repeat accepts the same, and the error it is judged by would be a fiction."""
    install(peers.VLLM_LOGITS, rejection_sample)
    peer = peer_named("vllm rejection_sample, model runner 2")
    inputs = peer.prepare_inputs(case.inputs)
    first = peer.accepted(inputs)
    assert torch.equal(first, peer.accepted(inputs))
    assert any(not torch.equal(first, (peer.renew(inputs), peer.accepted(inputs))[1]) for _ in range(8))


@pytest.mark.parametrize(
    ("failure", "text"),
    [(TypeError("unexpected keyword argument"), "TypeError: unexpected"), (AssertionError("mean accepted"), "mean")],
)
def test_a_peer_that_fails_is_left_out_with_the_reason(case, monkeypatch, failure, text):
    def raising(inputs):
        raise failure

    peer = peers.Peer(name="peer", reason=None, accepted=raising, prepare_inputs=lambda x: x)
    monkeypatch.setattr(harness, "peers_of", lambda task: [peer])
    with pytest.raises(pytest.skip.Exception, match=text):
        harness._contender(case, "rejection", "peer")


def test_a_missing_function_names_every_module_that_was_tried(install):
    install("sgl_kernel", lambda: None, called="other")
    with pytest.raises(ImportError, match=r"tree_speculative_sampling_target_only: .*sglang.*; .*sgl_kernel"):
        peers._found("tree_speculative_sampling_target_only", *peers.SGLANG_TREE)


def test_whoever_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    reasons = [peer.reason for peer in peers.peers_of("rejection")]
    names = ["vllm", "vllm", "flashinfer", "sglang", "sgl_kernel and sglang"]
    assert reasons == [f"{name} not installed" for name in names]
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "sglang" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [peer.reason is None for peer in peers.peers_of("rejection")] == [False, False, False, True, True]
    assert peers.peers_of("markov") == []
