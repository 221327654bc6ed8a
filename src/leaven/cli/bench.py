"""leaven bench RECIPE"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli import _next
from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, errors, load, stopping
from leaven.cli._screens import CountScreen, TextScreen
from leaven.planning.noise_ramp import fit_noise, noise_ramp
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.views.terminal import Column, Columns, Facts

if TYPE_CHECKING:
    from leaven.training.bench import Bench


SIZES = "N,N,..."


def bench_(
    recipe: RecipeArgument,
    micro_batch: Annotated[
        str | None, typer.Option(metavar=SIZES, help="Sequences a forward (powers of two).", show_default=False)
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(metavar=SIZES, help="Sequences a step (the recipe's batch, halved).", show_default=False),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of the peak that the first batch of a ramp should have.")
    ] = 0.9,
    seconds: Annotated[float, typer.Option(min=0, help="After so long no further measurement is begun.")] = 300,
    noise_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Propose a ramp from the noise scale that a run has measured; no speed is measured."
        ),
    ] = None,
    noise_multiple: Annotated[
        float, typer.Option(min=0.01, help="With --noise-from: noise scales that a batch may have.")
    ] = 1.0,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Tokens/s, MFU and memory over micro-batch and global batch; where a ramp should start. Writes nothing."""
    loaded = load(recipe, overrides)
    if noise_from is not None:
        _propose(loaded, recipe, overrides or [], noise_from, noise_multiple, json_output)
        return
    micro_batches, global_batches = _sizes("--micro-batch", micro_batch), _sizes("--global-batch", global_batch)

    from leaven.data.tokens import prepare
    from leaven.training.bench import batches_of, bench, micro_batches_of
    from leaven.training.engine import check_trainable

    with TextScreen() as text:
        tokens = prepare(loaded.data, loaded.model.vocab_size, progress=text.update)
        text.notes(tokens)
    check_trainable(loaded, tokens)
    with stopping() as stop, CountScreen("measuring") as screen:
        found = bench(
            loaded,
            tokens,
            micro_batches or micro_batches_of(loaded),
            global_batches or batches_of(loaded),
            limit_seconds=seconds,
            on_row=screen.update,
            stop=stop,
        )
        interrupted = stop()
    chosen = found.choose(share)
    following = _next.after_bench(recipe, chosen["micro_batch"]) if chosen else []
    if json_output:
        emit_json(document(found, share) | {"next": following})
    elif found.rows:
        _show(found, share)
        _next.say(following)
    if interrupted:
        errors.print("stopped before everything was measured; nothing is written, the same command begins anew")
        raise typer.Exit(75)
    if not found.rows:
        raise InputError("no micro-batch is as small as a global batch or fits in memory; give --micro-batch 1")


def _propose(recipe: Recipe, file: Path, overrides: list[str], run: Path, multiple: float, json_output: bool) -> None:
    """The ramp that the noise scale of a run allows, and what to type for it."""
    from leaven.training.run_folder import RunFolder

    lines = RunFolder(run).metrics()
    if not lines:
        raise InputError(f"--noise-from {run}: no run with a metrics.jsonl")
    fit = fit_noise([(line["tokens"], line["noise_scale"]) for line in lines if line.get("noise_scale")])
    found = noise_ramp(recipe, fit, multiple)
    following = _next.after_ramp(file, [*overrides, *found.settings]) if found.settings else []
    if json_output:
        emit_json(found.to_json() | {"next": following})
        return
    ahead = recipe.data.tokens / fit.to_tokens
    noise = [
        f"{format_quantity(fit.at(0))} tokens at {format_quantity(fit.from_tokens)}, {format_quantity(fit.last)} at "
        f"{format_quantity(fit.to_tokens)}: tokens^{fit.exponent:.2f} through {fit.points} measurements, off by a "
        f"factor of {fit.scatter:.2f}"
    ]
    if ahead > 1:
        noise.append(f"this run is {ahead:.3g} times as long as was measured: beyond, the power is extrapolated")
    facts = [("noise scale", noise), ("ramp", [found.reason])]
    if not found.settings:
        console.print(Facts(facts))
        return
    stages = [f"{format_quantity(each.tokens)} from {format_quantity(each.from_tokens)}" for each in found.stages]
    console.print(Facts([*facts, ("stages", stages)]))
    _next.say(following)


def _sizes(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise InputError(f"{option} {text}: write sequences with commas, for example 1,2,4,8")
    return sizes


def document(found: "Bench", share: float) -> dict[str, Any]:
    """The contract of ``leaven bench --json``."""
    return {
        "rows": [vars(row) | vars(found.utilisation(row)) for row in found.rows],
        "choose": found.choose(share),
        "too_large": found.too_large,
        "whole": found.whole,
        "unfinished": found.unfinished,
        "mfu_convention": found.convention,
    }


COLUMNS = (
    Column("global batch", "sequences"),
    Column("", "tokens"),
    Column("micro-batch", "sequences"),
    Column("tok/s"),
    Column("of peak", "(best)"),
    Column("TFLOP/s", drop=1),
    Column("MFU"),
    Column("memory", "GiB"),
)


def _show(found: "Bench", share: float) -> None:
    recipe, chosen = found.recipe, found.choose(share)
    peak = max(row.tokens_per_second for row in found.rows)
    rows, before = [], 0
    for row in found.rows:
        batch = ("", "")
        if row.global_batch != before:
            batch = (str(row.global_batch), format_quantity(row.global_batch * recipe.model.seq_len))
        best = row == found.best(row.global_batch)
        rows.append(
            (
                *batch,
                str(row.micro_batch),
                format_quantity(row.tokens_per_second),
                f"{row.tokens_per_second / peak:.0%}" if best else "",
                f"{row.tflops:.3g}",
                f"{row.mfu:.1%}",
                f"{row.peak_gib:.3g}",
            )
        )
        before = row.global_batch
    console.print(Columns(COLUMNS, rows))
    facts = [("MFU", (found.convention,))]
    if chosen is not None:
        start, largest = chosen["ramp_start"], max(size for size in found.global_batches if size != found.unfinished)
        facts += [
            ("micro-batch", (f"{chosen['micro_batch']} is fastest at a batch of {largest} sequences",)),
            (
                "ramp",
                (
                    f"start at {start['batch_tokens']:,} tokens ({start['global_batch']} sequences): "
                    f"{start['share_of_peak']:.0%} of full speed with micro-batch {start['micro_batch']}, "
                    f"the smallest batch above {share:.0%}",
                ),
            ),
        ]
    if found.too_large:
        facts.append(("memory", (f"micro-batches that do not fit: {', '.join(map(str, found.too_large))}",)))
    if found.unfinished is not None:
        said = f"not all micro-batches of {found.unfinished} sequences were measured, so nothing is chosen from it"
        facts.append(("unfinished", (said,)))
    if not found.whole:
        facts.append(("left out", ("the larger batches were not measured (stopped, or --seconds passed)",)))
    console.print(Facts(facts))
