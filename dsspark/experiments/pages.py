"""The results as a page of Markdown tables, beside their JSON and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsspark.evaluation.pages import shown, table
from dsspark.experiments.plan import TABLE_1
from dsspark.training.corpus import DOMAINS


def results_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of what `run_experiments` returned."""
    study = results["table1"]["study"]
    done, wanted = results["table1"]["measured_drafters"]
    lines = [
        "# Every drafter of the paper, trained alike",
        "",
        f"The {'reduced' if study['reduced'] else 'full'} study: {study['schedule']['steps']} steps a drafter, seeds "
        f"{', '.join(map(str, study['seeds']))}, {study['prompts']} held-out prompts a domain and seed of {study['max_new_tokens']} tokens; "
        f"{done} of {wanted} drafters measured. In brackets: 95 % Student intervals over seeds.",
        "",
        "## Tokens a round (Table 1)",
        "",
        *_table_1(results["table1"]),
        "## Which effects appear",
        "",
        "An effect *appears* if the interval of its difference lies above 0.",
        "",
        *table(
            ["verdict", "claim", "difference"],
            [
                [claim["verdict"], claim["claim"], shown(claim["difference"], digits=1)]
                for result in results.values()
                for claim in result["claims"]
            ],
        ),
        *_latency(results["figure4"]["latency"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table_1(result: Mapping[str, Any]) -> list[str]:
    columns = [(domain, temperature) for domain in DOMAINS for temperature in ("0", "1")]
    rows = [[spec.name, *(shown(result["tokens_per_round"][d][t][spec.key]) for d, t in columns)] for spec in TABLE_1]
    return table(["drafter", *(f"{d}, T = {t}" for d, t in columns)], rows)


def _latency(latency: Mapping[str, Any] | None) -> list[str]:
    if latency is None:
        return []
    rows = []
    for batch, by_drafter in latency.items():
        for gamma, times in by_drafter["dspark"].items():
            drafting = (by_drafter[name][gamma]["draft_share"] for name in ("dflash", "dspark", "eagle3"))
            shares = [*(f"{100 * share:.0f} %" for share in drafting), f"{100 * times['sequential_share']:.1f} %"]
            rows.append([batch, gamma, *shares])
    header = ["batch", "gamma", "drafting, dflash", "drafting, dspark", "drafting, eagle3", "DSpark's Markov loop"]
    return ["## Share of a round's time (Figure 4), on a CPU", "", *table(header, rows)]
