"""What kernels move by argument adds up to what the traffic table counts, and the committed file is that of these kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from benchmarks import movement
from benchmarks.cases import KERNEL
from benchmarks.sizes import SMALL_TRAFFIC, TRAFFIC
from benchmarks.tasks import TASKS
from benchmarks.traffic import count_traffic
from benchmarks.traffic_table import read
from dsspark.kernels.drafting import statistics_kernel
from dsspark.kernels.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(statistics_kernel), reason="counts what the interpreter moves")


@pytest.mark.parametrize("name", ["markov", "verification, pack", "rejection"])
def test_arguments_add_up_to_the_traffic(name):
    component, build = TASKS[name]
    record = movement.count_task(name, SMALL_TRAFFIC[component])
    case = build(SMALL_TRAFFIC[component], "cpu")
    with count_traffic() as traffic:
        case.contenders[KERNEL].run(case.inputs)
    assert record["moved"] == movement.total(record["launches"]) == traffic.total
    assert sum(entry["launches"] for entry in record["launches"].values()) == traffic.launches


def test_a_weight_is_read_once_a_position_and_named():
    size = SMALL_TRAFFIC["markov"]
    launches = movement.count_task("markov", size)["launches"]
    w2 = size.vocab_size * size.rank * size.dtype.itemsize
    assert launches["statistics_kernel"]["read"]["w2"] == size.block_size * w2
    assert "w2" not in launches["statistics_kernel"]["written"]


def test_memory_of_no_argument_is_an_error(monkeypatch):
    monkeypatch.setattr(movement, "_pointers", lambda executor, args, named: {})
    with pytest.raises(RuntimeError, match="pack_kernel touch memory of none of their arguments"):
        movement.count_task("verification, pack", SMALL_TRAFFIC["verification"])


def test_the_file_has_every_task_and_agrees_with_the_table():
    """Where the vocabulary counts, to 2 %: what launchers do with eager operations is in the table only. `make traffic` writes both."""
    recorded = movement.read()["tasks"]
    assert set(recorded) == set(TASKS)
    table = {row["task"]: row for row in read()["table"] if row["contender"] == KERNEL}
    for name, record in recorded.items():
        assert record["floor"] == table[name]["floor"]
        assert record["size"] == TRAFFIC[TASKS[name][0]].label
        assert record["moved"] == movement.total(record["launches"]) <= table[name]["moved"]
    for name in ("markov", "markov, recomputed", "verification, attention", "rejection"):
        assert recorded[name]["moved"] == pytest.approx(table[name]["moved"], rel=0.02)


def test_views_of_one_storage_count_once():
    class Executor:
        arg_names = ("x_ptr", "y_ptr", "n")

        @staticmethod
        def fn(x_ptr, y_ptr, n):
            """Do nothing."""

    x = torch.zeros(4)
    found = movement._pointers(Executor, (x,), {"y_ptr": x[1:], "n": 3, "num_warps": 4})
    assert list(found) == ["x"]
