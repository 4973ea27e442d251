"""The cost table: its staircase, its clock, its file."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch

from dsspark import CostTable


class Clock:
    """A clock that a step moves forward, so that timings are exact."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        self.log.append("clock")
        return self.now

    def step_of(self, seconds):
        """Return a step that takes `seconds[B]`, a number or a list to take from in turn."""

        def step(size):
            self.log.append(size)
            taken = seconds[size]
            self.now += taken.pop(0) if isinstance(taken, list) else taken

        return step


def test_a_table_is_a_frozen_float64_tensor_of_its_own():
    given = torch.tensor([1.0, 2.0, 0.5])
    table = CostTable(given)
    given[1] = 99.0
    assert table.sps.tolist() == [1.0, 2.0, 0.5]
    assert table.sps.dtype == torch.float64
    assert table.seconds.tolist() == [1.0, 0.5, 2.0]
    assert table.max_tokens == 2
    assert dict(table.provenance) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.sps = given
    double = torch.tensor([1.0, 2.0], dtype=torch.float64)
    kept = CostTable(double)
    double[1] = 99.0
    assert kept.sps.tolist() == [1.0, 2.0]


def test_flat_tables_and_any_entry_zero_are_fine():
    assert CostTable([1.0] * 5).max_tokens == 4
    assert CostTable([0.0, 1.0, 0.5]).sps.tolist() == [0.0, 1.0, 0.5]
    for unused in (math.inf, math.nan, -math.inf):
        assert CostTable([unused, 3.0, 0.5]).sps.tolist() == [3.0, 3.0, 0.5]


@pytest.mark.parametrize(
    ("sps", "text"),
    [
        ([], r"sps: got shape \[0\]"),
        ([1.0], r"sps: got shape \[1\]"),
        ([[1.0, 1.0]], r"sps: got shape \[1, 2\]"),
        ([1.0, 0.0], r"sps\[1:\]: got 0.0 at index 0"),
        ([1.0, 1.0, -1.0], r"sps\[1:\]: got -1.0 at index 1"),
        ([1.0, 1.0, math.nan], r"sps\[1:\]: got nan at index 1"),
        ([1.0, math.inf], r"sps\[1:\]: got inf at index 0.*profile the engine again"),
        ([-1.0, 1.0], r"sps\[0\]: got -1.0"),
    ],
)
def test_a_table_refuses_what_is_no_rate(sps, text):
    with pytest.raises(ValueError, match=text):
        CostTable(sps)


def test_provenance_is_text():
    assert CostTable([1.0, 1.0], {"gpu": "H200"}).provenance["gpu"] == "H200"
    with pytest.raises(TypeError, match="provenance: got an entry that is no str"):
        CostTable([1.0, 1.0], {"batch": 3})


def test_from_points_pads_up_to_the_next_measured_size():
    table = CostTable.from_points([8, 1, 4], [2.0, 0.5, 1.0], provenance={"engine": "e"})
    assert table.seconds.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert table.provenance == {"engine": "e"}
    assert CostTable.from_points([3], [4.0]).sps.tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("sizes", "seconds", "text"),
    [
        ([], [], "sizes: got none"),
        ([1, 2], [1.0], "seconds: got 1 entries, expected 2"),
        ([0, 2], [1.0, 1.0], r"sizes: got \[0, 2\]"),
        ([2, 2], [1.0, 1.0], r"sizes: got \[2, 2\]"),
        ([1, 2], [1.0, 0.0], "seconds: got 0.0 at index 1"),
        ([1, 2], [1.0, math.inf], "seconds: got inf at index 1"),
        ([1, 2], [math.nan, 1.0], "seconds: got nan at index 0"),
        ([1, 2], [-1.0, 1.0], "seconds: got -1.0 at index 0.*measure again"),
    ],
)
def test_from_points_names_the_bad_argument(sizes, seconds, text):
    with pytest.raises(ValueError, match=text):
        CostTable.from_points(sizes, seconds)


def test_profile_takes_the_median_after_a_warm_up():
    clock = Clock()
    step = clock.step_of({2: [99.0, 1.0, 7.0, 2.0], 4: [99.0, 3.0, 4.0, 50.0]})
    table = CostTable.profile(step, [2, 4], repeats=3, clock=clock, provenance={"model": "m"})
    assert table.seconds.tolist() == [2.0, 2.0, 2.0, 4.0, 4.0]
    assert clock.log == [2, *["clock", 2, "clock"] * 3, 4, *["clock", 4, "clock"] * 3]
    assert table.provenance["model"] == "m"
    assert (table.provenance["sizes"], table.provenance["repeats"]) == ("2 4", "3")
    assert table.provenance["torch"] == torch.__version__


def test_profile_reads_the_clock_with_the_device_idle(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.log.append(f"sync {device}"))
    step = clock.step_of({1: 1.0, 2: 2.0})
    CostTable.profile(step, [1, 2], repeats=1, warmup=0, device="cuda:0", clock=clock)
    timed = ["sync cuda:0", "clock", 1, "sync cuda:0", "clock"]
    assert clock.log == [*timed, *[2 if entry == 1 else entry for entry in timed]]
    clock.log.clear()
    CostTable.profile(step, [1, 2], repeats=1, warmup=2, device="cpu", clock=clock)
    assert clock.log == [1, 1, "clock", 1, "clock", 2, 2, "clock", 2, "clock"]


def test_profile_measures_real_time():
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    table = CostTable.profile(lambda size: torch.randn(size * 256, 256) @ weight, [1, 256], repeats=3)
    assert table.max_tokens == 256
    assert table.sps[1] > table.sps[256]


@pytest.mark.parametrize("seconds", [{1: 1.0, 8: 1.0}, {1: 1.0, 8: 1.04}, {1: 1.0, 8: 0.97}])
def test_profile_warns_of_a_flat_curve_and_still_returns_it(seconds):
    clock = Clock()
    with pytest.warns(UserWarning, match="flat curve says that drafts are free"):
        table = CostTable.profile(clock.step_of(seconds), [1, 8], clock=clock)
    assert table.max_tokens == 8


def test_profile_does_not_warn_of_a_curve_that_rises():
    clock = Clock()
    CostTable.profile(clock.step_of({1: 1.0, 8: 1.06}), [1, 8], clock=clock)  # warnings are errors


def test_profile_names_the_bad_argument():
    clock = Clock()
    step = clock.step_of({1: 0.0, 2: math.inf, 3: math.nan})
    for sizes, options, text in (
        ([], {}, "sizes: got none"),
        ([0, 1], {}, "sizes: got"),
        ([1, 1], {}, "sizes: got"),
        ([1], {"repeats": 0}, "repeats, warmup: got 0, 1"),
        ([1], {"warmup": -1}, "repeats, warmup: got 5, -1"),
        ([1], {}, "step: got 0.0 at index 0.*finer clock"),
        ([2], {}, "step: got"),
        ([3], {}, "step: got nan"),
    ):
        with pytest.raises(ValueError, match=text):
            CostTable.profile(step, sizes, clock=clock, **options)


def test_save_and_load_keep_every_bit(tmp_path):
    table = CostTable([1 / 3, 1 / 3, 1 / 7, 1e-300], {"machine": "zürich", "date": "2026-07-07"})
    path = tmp_path / "table.json"
    table.save(path)
    loaded = CostTable.load(str(path))
    assert torch.equal(loaded.sps, table.sps)
    assert loaded.provenance == table.provenance
    assert set(json.loads(path.read_text(encoding="utf-8"))) == {"sps", "provenance"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'{"rates": [1]}',
        b'{"sps": 3}',
        b'{"sps": ["a"]}',
        b'{"sps": [1, 1], "provenance": 3}',
        b"\xff\xfe",
    ],
)
def test_load_refuses_another_file(content, tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path: got .*table.json.*which is no cost table"):
        CostTable.load(path)


def test_load_checks_the_rates(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"sps": [1, 0]}')
    with pytest.raises(ValueError, match=r"sps\[1:\]: got 0.0"):
        CostTable.load(path)


def test_to_moves_the_table():
    table = CostTable([1.0, 1.0, 0.5], {"a": "b"})
    assert table.to("cpu") is table


@pytest.mark.gpu
def test_to_moves_the_table_to_a_gpu():
    moved = CostTable([1.0, 1.0, 0.5], {"a": "b"}).to("cuda")
    assert moved.sps.device.type == "cuda"
    assert moved.sps.tolist() == [1.0, 1.0, 0.5]
    assert moved.provenance == {"a": "b"}


# The graph limit, the facts, the plot


def test_above_the_graph_limit_nothing_is_padded():
    table = CostTable.from_points([2, 4, 8, 12], [0.5, 1.0, 3.0, 4.0], graph_limit=4)
    assert table.seconds.tolist() == pytest.approx([0.5, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.25, 3.5, 3.75, 4.0])
    # What was measured is kept to the bit, and so is the staircase.
    staircase = CostTable.from_points([2, 4, 8, 12], [0.5, 1.0, 3.0, 4.0])
    for size in (0, 1, 2, 3, 4, 8, 12):
        assert table.sps[size] == staircase.sps[size], size
    assert torch.equal(
        CostTable.from_points([2, 4], [0.5, 1.0], graph_limit=4).sps, CostTable.from_points([2, 4], [0.5, 1.0]).sps
    )
    assert CostTable.from_points([4, 1, 2], [4.0, 1.0, 2.0], graph_limit=1).seconds.tolist() == pytest.approx(
        [1, 1, 2, 3, 4]
    )


def test_a_graph_limit_that_was_not_measured_is_refused_before_measuring():
    clock = Clock()
    for build in (
        lambda: CostTable.from_points([2, 4], [0.5, 1.0], graph_limit=3),
        lambda: CostTable.profile(clock.step_of({}), [2, 4], graph_limit=3, clock=clock),
    ):
        with pytest.raises(ValueError, match=r"graph_limit: got 3, expected one of the sizes \[2, 4\]"):
            build()
    assert clock.log == []


def test_profile_passes_the_graph_limit_on_and_says_where_it_ran():
    clock = Clock()
    table = CostTable.profile(clock.step_of({2: 1.0, 4: 3.0, 6: 4.0}), [2, 4, 6], graph_limit=2, clock=clock)
    assert table.seconds.tolist() == pytest.approx([1, 1, 1, 2, 3, 3.5, 4])
    assert table.provenance["graph_limit"] == "2"
    assert table.provenance["machine"]
    assert len(table.provenance["date"].split("-")) == 3


def test_the_plot_is_an_image(tmp_path):
    path = tmp_path / "table.png"
    CostTable.from_points([2, 4, 8], [1.0, 1.1, 2.0]).plot(path, title="a table")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"Matplotlib.*pip install 'dsspark\[plots\]'"):
        CostTable([1.0, 1.0]).plot(tmp_path / "table.png")
