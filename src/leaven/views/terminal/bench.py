"""Show the result of ``leaven bench`` in the terminal: the measured throughput, or a proposed batch ramp."""

from collections.abc import Iterator

from rich.console import RenderableType

from leaven.documents.planning import BenchDocument, BenchSpeed, RampDocument
from leaven.recipe.units import format_quantity
from leaven.views.tables import Column, Fact, Facts, Table


def bench_screen(bench: BenchDocument, seq_len: int) -> Iterator[RenderableType]:
    """Yield a table of the measurements, the recommended micro-batch, and the start of a batch ramp."""
    first: dict[int, int] = {}  # the micro-batch of the first row, by batch size
    fastest: dict[int, float] = {}  # tokens per second, by batch size
    for row in bench.rows:
        first.setdefault(row.global_batch, row.micro_batch)
        fastest[row.global_batch] = max(fastest.get(row.global_batch, 0.0), row.tokens_per_second)
    peak = max(fastest.values())

    def once(row: BenchSpeed, text: str) -> str:
        return text if first[row.global_batch] == row.micro_batch else ""

    def of_peak(row: BenchSpeed) -> str:
        return f"{row.tokens_per_second / peak:.0%}" if row.tokens_per_second == fastest[row.global_batch] else ""

    columns = (
        Column("global batch", lambda row: once(row, str(row.global_batch)), unit="sequences"),
        Column("", lambda row: once(row, format_quantity(row.global_batch * seq_len)), unit="tokens"),
        Column("micro-batch", lambda row: str(row.micro_batch), unit="sequences"),
        Column("tok/s", lambda row: format_quantity(row.tokens_per_second)),
        Column("of peak", of_peak, unit="(best)"),
        Column("TFLOP/s", lambda row: f"{row.tflops:.3g}", drop=1),
        Column("MFU", lambda row: f"{row.mfu:.1%}"),
        Column("memory", lambda row: f"{row.peak_gib:.3g}", unit="GiB"),
    )
    yield Table.of(columns, bench.rows)
    facts: list[Fact] = [("MFU", bench.mfu_convention)]
    if bench.choose is not None:
        start, largest = bench.choose.ramp_start, max(size for size in fastest if size != bench.unfinished)
        ramp = (
            f"start at {start.batch_tokens:,} tokens ({start.global_batch} sequences), the smallest batch with at "
            f"least {bench.choose.share:.0%} of full speed: {start.share_of_peak:.0%} with micro-batch "
            f"{start.micro_batch}"
        )
        fastest_size = f"{bench.choose.micro_batch} is fastest at a batch of {largest} sequences"
        facts += [("micro-batch", fastest_size), ("ramp", ramp)]
    if bench.too_large:
        facts.append(("memory", f"micro-batches that do not fit: {', '.join(map(str, bench.too_large))}"))
    if bench.unfinished is not None:
        text = f"the batch of {bench.unfinished} sequences has unmeasured micro-batches and is not considered"
        facts.append(("unfinished", text))
    if not bench.whole:
        facts.append(("left out", "larger batches were not measured, because of Ctrl-C or --seconds"))
    yield Facts(*facts)


def ramp_screen(ramp: RampDocument, tokens: int) -> Iterator[RenderableType]:
    """Yield the fitted noise scale, and the stages of the proposed batch ramp for a run of ``tokens`` tokens."""
    fit, ahead = ramp.noise, tokens / ramp.noise.to_tokens
    first = fit.last * (fit.from_tokens / fit.to_tokens) ** fit.exponent
    noise = [
        f"{format_quantity(first)} tokens after {format_quantity(fit.from_tokens)} tokens of training, "
        f"{format_quantity(fit.last)} after {format_quantity(fit.to_tokens)}: a power law with exponent "
        f"{fit.exponent:.2f}, fitted to {fit.points} measurements (typical error: factor {fit.scatter:.2f})"
    ]
    if ahead > 1:
        noise.append(f"this run has {ahead:.3g} times as many tokens as were measured; later values are extrapolated")
    facts: list[Fact] = [("noise scale", noise), ("ramp", ramp.why)]
    if ramp.set:
        stages = [
            f"batch {format_quantity(each['tokens'])} from {format_quantity(each['from_tokens'])} on"
            for each in ramp.stages
        ]
        facts.append(("stages", stages))
    yield Facts(*facts)
