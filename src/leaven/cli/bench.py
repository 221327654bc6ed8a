"""leaven bench RECIPE"""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import JsonOption, RecipeArgument, SetOption, hand_over, load, prepared, stopping
from leaven.documents.planning import BenchChoice, BenchDocument, BenchSpeed, RampDocument
from leaven.planning.noise_ramp import fit_noise, noise_ramp
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.bench import bench_screen, ramp_screen
from leaven.views.terminal.console import errors
from leaven.views.terminal.live import LiveScreen

app = typer.Typer(add_completion=False)

SIZES = "N,N,..."


@app.command()
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
    loaded = load(recipe, overrides)
    if noise_from is not None:
        ramp = _propose(loaded, recipe, overrides or [], noise_from, noise_multiple)
        hand_over(ramp, ramp_screen(ramp, loaded.data.tokens), json_output)
        return
    micro_batches, global_batches = _sizes("--micro-batch", micro_batch), _sizes("--global-batch", global_batch)

    from leaven.training.bench import batches_of, bench, micro_batches_of
    from leaven.training.engine import check_trainable

    tokens = prepared(loaded)
    check_trainable(loaded, tokens)
    with stopping() as stop, LiveScreen() as screen:
        found = bench(
            loaded,
            tokens,
            micro_batches or micro_batches_of(loaded),
            global_batches or batches_of(loaded),
            limit_seconds=seconds,
            on_row=screen.counts("measuring"),
            stop=stop,
        )
        interrupted = stop()
    chosen = found.choose(share)
    document = BenchDocument(
        rows=[BenchSpeed(**vars(row) | vars(found.utilisation(row))) for row in found.rows],
        choose=None if chosen is None else BenchChoice(**chosen),
        too_large=found.too_large,
        whole=found.whole,
        unfinished=found.unfinished,
        mfu_convention=found.convention,
        next=next_commands.after_bench(recipe, chosen["micro_batch"]) if chosen else [],
    )
    if found.rows or json_output:
        hand_over(document, bench_screen(document, loaded.model.seq_len, share), json_output)
    if interrupted:
        errors.print("stopped before everything was measured; nothing is written, the same command begins anew")
        raise typer.Exit(75)
    if not found.rows:
        raise InputError("no micro-batch is as small as a global batch or fits in memory; give --micro-batch 1")


def _propose(recipe: Recipe, file: Path, overrides: list[str], run: Path, multiple: float) -> RampDocument:
    """The ramp that the noise scale of a run allows, and what to type for it."""
    from leaven.training.run_folder import RunFolder

    lines = RunFolder(run).metrics()
    if not lines:
        raise InputError(f"--noise-from {run}: no run with a metrics.jsonl")
    fit = fit_noise([(line["tokens"], line["noise_scale"]) for line in lines if line.get("noise_scale")])
    found = noise_ramp(recipe, fit, multiple)
    following = next_commands.after_ramp(file, [*overrides, *found.settings]) if found.settings else []
    return found.document().model_copy(update={"next": following})


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
