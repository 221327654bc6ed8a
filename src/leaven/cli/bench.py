"""Define the command ``leaven bench``."""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    load_recipe,
    prepare_tokens,
    print_document,
    stop_on_signal,
)
from leaven.documents.planning import RampDocument
from leaven.planning.noise_ramp import fit_noise, noise_ramp
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.views.terminal.bench import bench_screen, ramp_screen
from leaven.views.terminal.console import errors
from leaven.views.terminal.live import LiveScreen

app = typer.Typer(add_completion=False)


@app.command()
def bench_(
    recipe: RecipeArgument,
    micro_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Micro-batch sizes to measure, in sequences.", show_default="powers of two"
        ),
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Global batch sizes to measure, in sequences.",
            show_default="the recipe's batch, 1/2 of it, 1/4 of it and so on",
        ),
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1,
            help="Lowest acceptable speed at the start of a batch ramp, as a share of the full speed.",
        ),
    ] = 0.9,
    seconds: Annotated[
        float, typer.Option(min=0, help="Do not start another measurement after this many seconds.")
    ] = 300,
    noise_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Do not measure speed; propose a batch ramp from the noise scale that was measured in this run "
            "folder.",
        ),
    ] = None,
    noise_multiple: Annotated[
        float,
        typer.Option(
            min=0.01, help="With --noise-from: the largest allowed batch, as a multiple of the noise scale."
        ),
    ] = 1.0,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    loaded = load_recipe(recipe, overrides)
    if noise_from is not None:
        ramp = _propose(loaded, recipe, overrides or [], noise_from, noise_multiple)
        print_document(ramp, ramp_screen(ramp, loaded.data.tokens), json_output)
        return
    micro_batches, global_batches = _sizes("--micro-batch", micro_batch), _sizes("--global-batch", global_batch)

    from leaven.training.bench import batches_of, bench, micro_batches_of
    from leaven.training.engine import check_trainable

    tokens = prepare_tokens(loaded)
    check_trainable(loaded, tokens)
    with stop_on_signal() as stop, LiveScreen() as screen:
        document = bench(
            loaded,
            tokens,
            micro_batches or micro_batches_of(loaded),
            global_batches or batches_of(loaded),
            limit_seconds=seconds,
            share=share,
            on_row=screen.counts("measuring"),
            stop=stop,
        )
        interrupted = stop()
    if document.choose is not None:
        following = next_commands.after_bench(recipe, document.choose.micro_batch)
        document = document.model_copy(update={"next": following})
    if document.rows or json_output:
        print_document(document, bench_screen(document, loaded.model.seq_len, share), json_output)
    if interrupted:
        errors.print(
            "stopped before everything was measured; nothing is saved, so the same command starts from the beginning"
        )
        raise typer.Exit(75)
    if not document.rows:
        raise InputError(
            "every micro-batch is larger than the global batch or does not fit in memory; type --micro-batch 1"
        )


def _propose(recipe: Recipe, file: Path, overrides: list[str], run: Path, multiple: float) -> RampDocument:
    """Propose a batch ramp from the gradient noise scale that a run has measured."""
    from leaven.training.run_folder import RunFolder

    lines = RunFolder(run).metrics()
    if not lines:
        raise InputError(f"--noise-from {run}: the folder has no metrics.jsonl; give the folder of a run")
    fit = fit_noise([(line["tokens"], line["noise_scale"]) for line in lines if line.get("noise_scale")])
    found = noise_ramp(recipe, fit, multiple)
    following = next_commands.after_ramp(file, [*overrides, *found.set]) if found.set else []
    return found.model_copy(update={"next": following})


def _sizes(option: str, text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise InputError(
            f"{option} {text} is not a list of batch sizes; give numbers of sequences separated by commas, e.g. "
            "1,2,4,8"
        )
    return sizes
