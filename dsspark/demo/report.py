"""report.html: one file, readable without a network, in which every number says what it means."""

from __future__ import annotations

from html import escape
from importlib import resources

from dsspark.demo.figures import Axes, Series, bar_chart, line_chart
from dsspark.demo.measure import DIAGRAM_BINS, Calibration
from dsspark.demo.page import card, figure, figures, flat, number, percent, table
from dsspark.demo.results import Results, mean
from dsspark.demo.text import END_MARK, Piece, harmless, to_spans
from dsspark.demo.transcripts import Transcript

MARKOV, PARALLEL = "with Markov head", "parallel only"


def render_report(results: Results) -> str:
    """Return the page."""
    style = (resources.files("dsspark") / "demo" / "report.css").read_text(encoding="utf-8")
    sections = [
        _head(results),
        _texts(results.transcripts),
        _tokens(results),
        "" if results.calibration is None else _calibration(results.calibration),
        _scheduler(results),
        _speed(results),
        _losslessness(results),
        _facts(results),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>DSpark demo report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(results: Results) -> str:
    total, parallel = results.rounds.total, results.rounds_parallel_only.total
    greedy, law, speed = results.greedy, results.law, results.speeds[0]
    prompts = sum(results.settings["held_out_prompts"].values())
    cards = [
        card(
            number(total.tokens_per_round),
            "tokens a round",
            f"Accepted drafts plus one, for each pass of the target. {number(parallel.tokens_per_round)} without the Markov head; "
            "1 is plain decoding.",
        ),
        card(
            f"{greedy.prompts - greedy.different} / {greedy.prompts}",
            "greedy texts equal",
            f"Prompts whose greedy text with the drafter equals the target's own, token for token ({greedy.tokens:,} tokens).",
        ),
        card(
            f"{law.max_law_error_in_eps:.2f} ε",
            "largest law error",
            f"The worst deviation of a probability from the target's law over {law.rows} real draft positions, in float32 epsilons "
            "(1.2e-7): rounding, not sampling noise.",
        ),
        card(
            f"{speed.median:.2f}×",
            "wall-clock against plain decoding",
            f"Median of {len(speed.ratios)} alternating pairs, one request at a time, temperature {speed.temperature:g}, here. "
            + ("Above 1: faster." if speed.median > 1 else "Below 1: slower here; the draft costs more than it saves."),
        ),
    ]
    if results.calibration is not None:
        found = results.calibration
        cards.insert(
            1,
            card(
                percent(mean(found.ece_after)),
                "calibration error",
                "How far the predicted survival of a draft is from what happens, after STS; "
                f"{percent(mean(found.ece_before))} before.",
            ),
        )
    quick = (
        '<p class="quiet"><em>A quick run on a handful of prompts: it shows that everything works and measures little.</em></p>'
        if results.settings["quick"]
        else ""
    )
    return (
        "<header><h1>DSpark on real text, on this machine</h1>"
        "<p>A small language model over bytes continues text it has never seen. A drafter proposes "
        f"{total.block_size} bytes at a time, the model checks them in one pass, and the text has exactly the law of the model "
        f"alone. Everything below was measured in this run, on {prompts} held-out prompts "
        f"({escape(', '.join(results.settings['domains']))}), in {results.seconds:.0f} seconds.</p>{quick}</header>"
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _spans(pieces: list[Piece]) -> str:
    return "".join(
        escape(text) if kind == "target" else f'<span class="{kind}">{escape(text)}</span>'
        for text, kind in to_spans(pieces)
    )


def _texts(transcripts: list[Transcript]) -> str:
    parts = [
        "<h2>The text</h2>",
        '<p class="key"><span class="accepted">accepted</span> drafts that the target took over; '
        '<span class="corrected">corrected</span> the target’s own byte where a draft was rejected; '
        '<span class="bonus">bonus</span> one more byte where the whole block was accepted. '
        f"{END_MARK} ends a text. At temperatures above 0 both texts are draws from the same law, not the same text.</p>",
    ]
    for transcript in transcripts:
        count, alone = len(transcript.drafted), len(transcript.alone)
        parts.append(
            f"<h3>{escape(transcript.prompt.title)}</h3>"
            f'<pre class="prompt" tabindex="0" aria-label="prompt">{escape(harmless(transcript.prompt.text))}</pre>'
            '<div class="texts"><div>'
            f'<b>With the drafter</b> <span class="quiet">{count} bytes in {transcript.drafted_rounds} passes of the target: '
            f"{transcript.count('accepted')} accepted, {transcript.count('corrected')} corrected, "
            f"{transcript.count('bonus')} bonus; {transcript.drafted_seconds:.2f} s</span>"
            f'<pre tabindex="0" aria-label="text with the drafter">{_spans(transcript.drafted)}</pre></div><div>'
            f'<b>The target alone</b> <span class="quiet">{alone} bytes in {alone} passes; {transcript.alone_seconds:.2f} s</span>'
            f'<pre tabindex="0" aria-label="text of the target alone">{_spans(transcript.alone)}</pre></div></div>'
        )
    return "\n".join(parts)


def _tokens(results: Results) -> str:
    ours, theirs = results.rounds, results.rounds_parallel_only
    pairs = [(domain, ours.by_domain[domain], theirs.by_domain[domain]) for domain in ours.by_domain]
    pairs.append(("all", ours.total, theirs.total))
    positions = list(range(1, ours.total.block_size + 1))

    def acceptance(title: str, kind: str) -> str:
        axes = Axes(
            title=title,
            description="Lines by draft position; the numbers are in the table below.",
            x_label="draft position",
            y_label="accepted",
            percent=True,
            y_max=1.0,
        )
        return line_chart(
            axes, positions, [Series(MARKOV, getattr(ours.total, kind)), Series(PARALLEL, getattr(theirs.total, kind))]
        )

    bars = bar_chart(
        Axes(
            title="Tokens a round by domain",
            description="; ".join(
                f"{name}: {number(a.tokens_per_round)} with, {number(b.tokens_per_round)} without the Markov head"
                for name, a, b in pairs
            ),
            x_label="domain of the text",
            y_label="tokens a round",
        ),
        [name for name, _, _ in pairs],
        [
            Series(MARKOV, [a.tokens_per_round for _, a, _ in pairs]),
            Series(PARALLEL, [b.tokens_per_round for _, _, b in pairs]),
        ],
    )
    rows = []
    for name, a, b in pairs:
        rows.append(
            (f"{name}, {MARKOV}", str(a.rounds), number(a.tokens_per_round), *map(percent, a.conditional_acceptance))
        )
        rows.append(
            (
                f"{name}, {PARALLEL}",
                str(b.rounds),
                number(b.tokens_per_round),
                *map(percent, b.conditional_acceptance),
            )
        )
    return (
        "<h2>What the Markov head is for</h2>"
        "<p>Both drafters were trained on the same batches. The parallel one drafts every position without knowing what it drew "
        "before; the Markov head corrects each position by the token drawn just before it, so a block does not mix two "
        "continuations.</p>"
        + figures(
            figure(bars, "Accepted drafts plus the correction or the bonus, when whole blocks are verified."),
            figure(
                acceptance("Acceptance of a position, given its prefix", "conditional_acceptance"),
                "How often draft k is accepted once drafts 1 to k-1 were.",
            ),
            figure(
                acceptance("Survival of the whole prefix", "cumulative_acceptance"),
                "How often drafts 1 to k are all accepted. One plus the sum of this line is the tokens a round.",
            ),
        )
        + "<details><summary>The numbers: acceptance by position, given its prefix</summary>"
        + table(["", "rounds", "tokens a round", *map(str, positions)], rows)
        + "</details>"
    )


def _calibration(found: Calibration) -> str:
    positions = [str(k + 1) for k in range(len(found.ece_after))]
    bars = bar_chart(
        Axes(
            title="Calibration error by position",
            description=f"Means: {percent(mean(found.ece_before))} before, {percent(mean(found.ece_after))} after STS.",
            x_label="draft position",
            y_label="ECE",
            percent=True,
        ),
        positions,
        [
            Series("before", found.ece_before),
            Series("after STS", found.ece_after),
            Series("a perfect head", found.noise_floor),
        ],
        numbers=False,
    )
    middles = [(index + 0.5) / DIAGRAM_BINS for index in range(DIAGRAM_BINS)]
    diagram = line_chart(
        Axes(
            title="Reliability diagram",
            description="Observed against predicted survival; on the diagonal they agree.",
            x_label="predicted survival of drafts 1 to k",
            y_label="observed",
            percent=True,
            y_max=1.0,
            diagonal=True,
        ),
        middles,
        [Series("before", found.before.mean_outcome.tolist()), Series("after STS", found.after.mean_outcome.tolist())],
        [f"{100 * middle:.0f}%" if index % 2 else "" for index, middle in enumerate(middles)],
    )
    rows = [
        (name, *map(percent, values), percent(mean(values)))
        for name, values in (
            ("before", found.ece_before),
            ("after STS", found.ece_after),
            ("a perfect head", found.noise_floor),
        )
    ]
    rows.append(("STS temperature", *(number(value) for value in found.temperatures), ""))
    rows.append(("AUROC after STS", *(number(value, ".3f") for value in found.auroc), ""))
    return (
        "<h2>How well the drafter knows itself</h2>"
        "<p>The confidence head predicts how likely drafts 1 to k are to survive together; the scheduler spends the target’s time "
        f"by it. Measured on {found.samples:,} full-length rounds of held-out text. The shipped temperatures (STS) were fitted "
        "before, on other rounds. “A perfect head” is the error that a flawless prediction would show on this many rounds, by "
        "chance alone.</p>"
        + figures(
            figure(bars, "Expected calibration error (20 bins). Lower is better."),
            figure(diagram, f"All positions together, {DIAGRAM_BINS} bins: what was predicted against what happened."),
        )
        + table(["ECE", *positions, "mean"], rows)
    )


def _scheduler(results: Results) -> str:
    costs, sweep = results.cost_table, results.sweep
    counts = [point.num_requests for point in sweep]
    budgets = list(sweep[0].budgets)
    rates = list(sweep[0].tokens_per_second)
    sizes = [int(size) for size in costs.provenance["sizes"].split()]
    sizes.sort()
    milliseconds = [1e3 * float(costs.seconds[size]) for size in sizes]
    labelled = {1, 4, 16, 64, 256, 1024}
    cost = line_chart(
        Axes(
            title="Cost of a step on this machine",
            description=f"{milliseconds[0]:.1f} ms at {sizes[0]} token, {milliseconds[-1]:.1f} ms at {sizes[-1]} tokens.",
            x_label="tokens verified in a step, B (logarithmic)",
            y_label="milliseconds",
            log_x=True,
        ),
        sizes,
        [Series("draft + target pass + verification", milliseconds)],
        [str(size) if size in labelled else "" for size in sizes],
    )
    budget = line_chart(
        Axes(
            title="What the schedulers verify as requests grow",
            description="; ".join(
                f"{p.num_requests} requests: {', '.join(f'{n} {b:.2f}' for n, b in p.budgets.items())}" for p in sweep
            ),
            x_label="requests decoded together, R (logarithmic)",
            y_label="tokens a request, 1 + l",
            y_max=float(results.rounds.total.block_size + 1),
            log_x=True,
        ),
        counts,
        [Series(name, [point.budgets[name] for point in sweep]) for name in budgets],
    )
    throughput = line_chart(
        Axes(
            title="Throughput as requests grow",
            description="Measured tokens a second of all requests together.",
            x_label="requests decoded together, R (logarithmic)",
            y_label="tokens a second",
            log_x=True,
        ),
        counts,
        [Series(name, [point.tokens_per_second[name] for point in sweep]) for name in rates],
    )
    rows = [
        (
            str(point.num_requests),
            *(number(point.budgets[name]) for name in budgets),
            *(number(point.tokens_per_second[name], ",.0f") for name in rates),
        )
        for point in sweep
    ]
    headings = ["requests", *(f"1 + l, {name}" for name in budgets), *(f"tokens/s, {name}" for name in rates)]
    return (
        "<h2>What the scheduler admits</h2>"
        "<p>Verifying a draft is worth it while the expected gain in tokens outweighs the longer step. The cost table was profiled "
        "on this machine at the start of the run. <b>Algorithm 1</b> admits drafts by survival and stops at the first that does "
        "not pay; <b>delayed</b> searches for the best budget over the confidences of two steps before, which may be global "
        "without leaking, and fills it by the current ones.</p>"
        + figures(
            figure(cost, "Median time of whole decoding steps, by the number of verified tokens."),
            figure(budget, "Mean verified tokens of each request and step, its anchor included. 1 verifies no draft."),
            figure(throughput, "A few steps each, in the same run: an indication, not a benchmark."),
        )
        + "<details><summary>The numbers</summary>"
        + table(headings, rows)
        + "</details>"
    )


def _speed(results: Results) -> str:
    rows = [
        (
            f"temperature {speed.temperature:g}, {speed.policy}",
            f"{speed.drafted:,.0f}",
            f"{speed.alone:,.0f}",
            f"{speed.median:.2f}×",
            f"{min(speed.ratios):.2f} to {max(speed.ratios):.2f}×",
            str(len(speed.ratios)),
        )
        for speed in results.speeds
    ]
    return (
        "<h2>Wall-clock against plain decoding</h2>"
        "<p>The same loop with and without a drafter, one request at a time, prompt included; which goes first alternates. "
        "On a CPU the readable reference is timed, not the kernels: this says what the method gives here, not what it gives on a "
        "GPU.</p>" + table(["", "drafted, bytes/s", "alone, bytes/s", "median ratio", "range", "pairs"], rows)
    )


def _losslessness(results: Results) -> str:
    greedy, law = results.greedy, results.law
    verdict = (
        "The residual and the bonus draw depend on the drafted token, which is a fault."
        if law.final_varies
        else "The residual and the bonus draw do not depend on the drafted token, as they must not."
    )
    rows = [
        ("prompts whose greedy text is equal", f"{greedy.prompts - greedy.different} of {greedy.prompts}"),
        ("draft positions bisected", str(law.rows)),
        (
            "largest deviation of a probability",
            f"{law.max_law_error:.2e} = {law.max_law_error_in_eps:.2f} float32 epsilons",
        ),
        ("largest deviation of an acceptance threshold", f"{law.max_threshold_ulps:.2f} ulps of min(1, p/q)"),
        *((f"largest law error, {domain}", f"{value:.2f} epsilons") for domain, value in law.by_domain.items()),
    ]
    return (
        "<h2>Is it really the target’s law?</h2>"
        "<p>This is no sampling test: a round is a step function of its random numbers, so every breakpoint of the draft, of the "
        "acceptance test and of the final draw was found by bisection to the last float32 bit, on the models’ own logits from real "
        f"rounds (temperature {law.temperature:g}), and the exact law of the emitted token was put together in float64. "
        f"What is left is the rounding of float32. {escape(verdict)}</p>" + table([], rows, ' class="facts"')
    )


def _facts(results: Results) -> str:
    weights = results.provenance
    told = f"seed {weights.get('seed', 'unknown')}, commit {weights.get('commit') or 'unknown'}"
    return (
        "<h2>Where these numbers come from</h2><h3>This run</h3>"
        + table([], [*flat(results.environment), *flat(results.settings)], ' class="facts"')
        + f"<h3>The weights</h3><p>Shipped with the package: {escape(told)}. What follows was recorded when they were trained; "
        "it was not measured in this run.</p><details><summary>The record of the training</summary>"
        + table([], flat(weights), ' class="facts"')
        + "</details>"
    )
