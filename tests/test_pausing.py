"""The pausing drafter: lossless, as fast as plain decoding on hard text, drafting again where the text gets easy."""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCAB, prompts_of, tiny_model
from toy_drafters import OracleDrafter

from dsspark.cost_table import CostTable
from dsspark.decoding import generate
from dsspark.models.huggingface import HuggingFaceTarget
from dsspark.models.qwen3 import Qwen3Drafter
from dsspark.serving import pausing
from dsspark.serving.pausing import PausingDrafter

LAYERS = (-1, 1)
TABLE = CostTable([1.0, 1 / 1.3, 1 / 1.4, 1 / 1.5, 1 / 1.6, 1 / 1.7])
"""A drafted round takes 1.3 plain rounds and 0.1 more for every draft."""


class Sure:
    """An oracle of one text that is sure of itself, right or wrong, with a diary."""

    def __init__(self, text: list[int], block_size: int = 4) -> None:
        self.oracle = OracleDrafter([text], block_size)
        self.block_size, self.sts_temperatures = block_size, None
        self.rounds: list[int] = []
        self.rows = 0

    def new_context(self, num_requests):
        return self.oracle.new_context(num_requests)

    def extend(self, context, features, request_ids):
        self.rows += len(request_ids)
        self.oracle.extend(context, features, request_ids)

    def propose(self, anchors, context, uniforms, **named):
        self.rounds.append(self.rows)
        proposal = self.oracle.propose(anchors, context, uniforms, **named)
        return proposal._replace(confidence_logits=torch.full_like(uniforms.accept, 9.0))


def decode(drafter, prompt, count=100, plain=1.0, **named):
    """Return the text, and seconds over plain seconds by the table's clock."""
    model = tiny_model("llama")
    alone = generate(HuggingFaceTarget(model), None, [prompt], count, 0.0).tokens
    used = PausingDrafter(drafter, TABLE, plain, **named)
    seconds = []

    def on_round(report):
        paused = not report.lengths.any() and not report.survival.any()
        seconds.append(plain if paused else TABLE.seconds[1 + int(report.lengths[0])].item())

    result = generate(HuggingFaceTarget(model, LAYERS), used, [prompt], count, 0.0, policy=used, on_round=on_round)
    assert result.tokens == alone
    return result.tokens[0], sum(seconds) / count


def text_of(prompt, count=100):
    return generate(HuggingFaceTarget(tiny_model("llama")), None, [prompt], count, 0.0).tokens[0]


def test_hard_text_costs_at_most_five_percent_more():
    """A drafter that is always wrong and always sure: without pauses each round takes 1.7 plain ones."""
    prompt = prompts_of([5])[0]
    wrong = Sure([*prompt, *((token + 1) % VOCAB for token in text_of(prompt))])
    _, relative = decode(wrong, prompt)
    assert 1 < relative < 1.05
    assert 2 <= len(wrong.rounds) <= 8
    _, short_pauses = decode(Sure(wrong.oracle.texts[0]), prompt, pause=1)
    assert short_pauses > relative


def test_easy_text_is_drafted_in_every_round():
    prompt = prompts_of([5])[0]
    right = Sure([*prompt, *text_of(prompt)])
    _, relative = decode(right, prompt)
    assert len(right.rounds) == 20
    assert relative == pytest.approx(1.7 / 5)


def test_drafting_resumes_with_the_whole_context():
    """Wrong for 30 tokens, then right: pauses end, and the drafter has seen every verified token when it drafts again."""
    prompt = prompts_of([5])[0]
    text = text_of(prompt)
    mixed = Sure([*prompt, *((t + 1) % VOCAB if i < 30 else t for i, t in enumerate(text))])
    _, relative = decode(mixed, prompt)
    assert relative < 0.8
    gaps = [b - a for a, b in zip(mixed.rounds, mixed.rounds[1:], strict=False)]
    assert max(gaps) >= 8
    assert mixed.rounds[-1] == mixed.rows
    assert mixed.rows >= len(prompt) + 100 - 6


def test_a_drafter_with_a_context_of_its_own_keeps_the_law():
    """An untrained drafter, with real contexts behind the pauses."""
    model = tiny_model("llama")
    drafter = Qwen3Drafter.fresh(model, LAYERS, block_size=4, num_layers=1, markov_rank=8)
    for prompt in prompts_of([1, 7]):
        decode(drafter, prompt, 40)


def test_it_decodes_one_request():
    drafter = PausingDrafter(Sure([1, 2]), TABLE, 1.0)
    with pytest.raises(ValueError, match="num_requests: got 2, expected 1"):
        drafter.new_context(2)


@pytest.mark.parametrize(
    ("named", "message"),
    [({"plain": 0.0}, "plain: got 0"), ({"memory": 0.5}, "memory: got 0.5"), ({"pause": 0}, "pause: got 0")],
)
def test_errors_name_the_argument(named, message):
    with pytest.raises(ValueError, match=message):
        PausingDrafter(Sure([1, 2]), TABLE, **{"plain": 1.0, **named})


def test_a_policy_without_its_drafter_says_so():
    with pytest.raises(RuntimeError, match="pass it as both"):
        PausingDrafter(Sure([1, 2]), TABLE, 1.0).step(torch.ones(1, 4), [0])


def test_pauses_double_up_to_a_limit():
    drafter = PausingDrafter(Sure([1, 2]), TABLE, 1.0, pause=2)
    context = drafter.new_context(1)
    context.verified, found = 4, []
    row = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int32)
    for _ in range(200):
        if context.paused:
            context.paused = 0
        drafter.extend(context, *row)
        if context.paused:
            found.append(context.paused)
    assert found[:6] == [2, 4, 8, 16, 32, 32]
    assert max(found) == 2 * pausing.LONGEST_PAUSE
