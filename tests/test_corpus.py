"""The corpus and the worked arithmetic: right, split by file, and a function of the seed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from dsspark.models.target import BOS_ID, EOS_ID
from dsspark.training.arithmetic import CLAUSE, CLOSERS, LASTLY, OPENERS, REMARK, STEPS, TEMPLATES, problem
from dsspark.training.corpus import DOMAINS, Document, TokenStream, documents, held_out_prompts, is_held_out
from dsspark.training.pretrain import mixed_rows


@pytest.fixture(scope="module")
def streams() -> dict[str, TokenStream]:
    """The training split, with a few hundred problems."""
    return {domain: TokenStream(documents(domain, held_out=False, num_math=200), domain) for domain in DOMAINS}


def test_worked_arithmetic_is_right():
    """Every equation of 600 answers holds, the stated answer is the last result, and every template occurs."""
    seen = set()
    for seed in range(600):
        question, answer = problem(seed)
        assert question.startswith("Question: ")
        assert question.endswith("\nAnswer:")
        equations = re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", answer)
        assert equations
        for left, right in equations:
            assert eval(left) == int(right), (left, right)
        stated = int(re.findall(r"(\d+)\.\n$", answer)[0])
        addition = re.search(r"Compute (\d+) \+ (\d+)\.", question)
        assert stated == (int(addition[1]) + int(addition[2]) if addition else int(equations[-1][1]))
        seen.add(re.sub(r"\d+|[A-Z][a-z]+", "", question)[:12])
    assert len(seen) >= len(TEMPLATES)


def test_a_problem_is_a_function_of_its_seed_and_wordings_vary():
    assert problem(5) == problem(5)
    openings = {problem(seed)[1].split()[0] for seed in range(60)}
    assert openings == {opener.strip() for opener in OPENERS}


def test_words_of_a_group_are_told_apart_by_the_byte_before():
    """Equal lengths, so that texts join again; and within a group the byte at i fixes the byte at i + 1, for i > 0 as well."""
    for group in (OPENERS, STEPS, LASTLY, CLOSERS, *CLAUSE, *REMARK):
        assert len({len(word) for word in group}) == 1
        for index in range(len(group[0]) - 1):
            pairs = {word[index : index + 2] for word in group}
            assert len({pair[0] for pair in pairs}) == len(pairs), (group, index)


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_file_is_in_both_splits(domain):
    """Modules, topics and seeds of the two splits are disjoint, and both have text."""
    train_names, held_out_names = (
        {document.name for document in documents(domain, held_out=flag, num_math=50)} for flag in (False, True)
    )
    assert train_names
    assert held_out_names
    assert not train_names & held_out_names


def test_docstrings_follow_their_module_into_its_split():
    """A held-out module's docstrings are not trained on: the file decides, not the object's name."""
    held_out_modules = {document.name for document in documents("code", held_out=True)}
    trained_modules = {document.name for document in documents("code", held_out=False)}
    for flag, own, other in ((True, held_out_modules, trained_modules), (False, trained_modules, held_out_modules)):
        names = [document.name for document in documents("chat", held_out=flag) if "." in document.name]
        assert names
        for name in names:
            parents = {name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)}
            longest = max(parents & (own | other), key=len, default=None)
            assert longest is None or longest in own, name


def test_corpus_has_no_tests_and_no_tables():
    names = [document.name for flag in (False, True) for document in documents("code", held_out=flag)]
    assert not [name for name in names if {"test", "tests", "encodings", "pydoc_data"} & set(name.split("."))]
    assert len(names) > 200


def test_the_split_reads_the_name_only():
    share = sum(is_held_out(f"module{index}") for index in range(3000)) / 3000
    assert 1 / 16 < share < 1 / 9
    assert is_held_out("json.decoder") == is_held_out("json.decoder")


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_prompts_are_held_out_and_continue(domain):
    prompts = held_out_prompts(domain, 12)
    assert len(prompts) == 12
    assert len({prompt.text for prompt in prompts}) == 12
    assert held_out_prompts(domain, 12) == prompts
    assert held_out_prompts(domain, 12, seed=1) != prompts
    sources = {document.name: document.text for document in documents(domain, held_out=True, num_math=40)}
    for prompt in prompts:
        assert prompt.prompt
        assert prompt.continuation
        assert (
            prompt.text in sources[prompt.name.partition(":")[0] if domain == "code" else prompt.name]
            or domain == "chat"
        )


def test_streams_end_each_document_and_start_at_boundaries():
    texts = [Document("a", b"q", b"ab\ncd"), Document("b", b"", b"xy\n")]
    math, code = TokenStream(texts, "math"), TokenStream(texts, "code")
    assert math.tokens.tolist() == [*b"qab\ncd", EOS_ID, *b"xy\n", EOS_ID]
    assert set(math.starts.tolist()) == {0, 7, 11}
    assert set(code.starts.tolist()) == {0, 4, 7, 10, 11}
    rows = math.rows(np.random.default_rng(0), 40, 9)
    assert rows.shape == (40, 9)
    assert (rows[:, 0] == BOS_ID).all()
    assert set(rows[:, 1].tolist()) == {ord("q"), ord("x")}


def test_corpus_errors_name_the_argument():
    for call in (lambda: documents("poetry", held_out=True), lambda: held_out_prompts("poetry", 1)):
        with pytest.raises(ValueError, match=r"^domain: got 'poetry', expected one of math, code, chat"):
            call()
    with pytest.raises(ValueError, match=r"^texts: got no document"):
        TokenStream([], "math")


def test_rows_are_a_function_of_seed_and_step(streams):
    rows = mixed_rows(streams, 3, 7, 16, 40)
    assert rows.shape == (16, 40)
    assert torch.equal(rows, mixed_rows(streams, 3, 7, 16, 40))
    assert not torch.equal(rows, mixed_rows(streams, 3, 8, 16, 40))
    assert not torch.equal(rows, mixed_rows(streams, 4, 7, 16, 40))
