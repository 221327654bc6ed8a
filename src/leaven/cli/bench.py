"""Defines the command ``leaven bench``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    ShareOption,
    count_above_0,
    exit_interrupted,
    list_option,
    load_recipe,
    option,
    prepare_text,
    print_document,
    require_alone,
    stop_on_signal,
)
from leaven.errors import InputError
from leaven.planning.ramp import fit_noise, noise_ramp
from leaven.views.terminal.bench import bench_screen, ramp_screen
from leaven.views.terminal.console import warn
from leaven.views.terminal.live import LiveScreen


def bench(
    context: typer.Context,
    recipe: RecipeArgument,
    micro_batch: Annotated[
        Any, list_option(count_above_0, "Micro-batch sizes to measure, in sequences.", "powers of two", "N,N,...")
    ] = None,
    global_batch: Annotated[
        Any,
        list_option(
            count_above_0,
            "Global batch sizes to measure, in sequences.",
            "the recipe's batch, 1/2 of it, 1/4 of it and so on",
            "N,N,...",
        ),
    ] = None,
    share: ShareOption = 0.9,
    seconds: Annotated[float, option("Do not start another measurement after this many seconds.", min=0)] = 300,
    noise_from: Annotated[
        Path | None,
        option(
            "Do not measure speed. Propose a batch ramp from the gradient noise scale that the run in this folder "
            "has recorded.",
            metavar="RUN",
        ),
    ] = None,
    noise_multiple: Annotated[
        float,
        option("With --noise-from: the largest allowed batch size, as a multiple of the noise scale.", min=0.01),
    ] = 1.0,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    if noise_from is None:
        require_alone(context, "a measurement of speed (without --noise-from)", "noise_multiple")
    else:
        require_alone(context, "--noise-from", "micro_batch global_batch share seconds device")
    loaded = load_recipe(recipe, overrides)
    if noise_from is not None:
        from leaven.training.integrity import changed_since
        from leaven.training.run_folder import RunFolder, finish_of

        run = RunFolder(noise_from)
        read = run.read_metrics()
        lines = read.documents
        if not lines:
            raise InputError(f"--noise-from {noise_from}: no steps in its metrics.jsonl; give the folder of a run")
        if (why := changed_since(run, finish_of(run.read_events())).get(run.metrics_file.name)) is not None:
            raise InputError(f"{run.metrics_file} is not as the run wrote it: {why}; restore it")
        if skipped := read.skipped(run.metrics_file):
            warn([f"{skipped}; if you have an undamaged copy of the file, restore it"])
        fit = fit_noise([(line["tokens"], line["noise_scale"]) for line in lines if line.get("noise_scale")])
        ramp = noise_ramp(loaded, fit, noise_multiple)
        following = [next_commands.launch(recipe, [*(overrides or ()), *ramp.set])] if ramp.set else []
        print_document(ramp, ramp_screen(ramp, loaded.data.tokens), json_output, following)
        return

    from leaven.training.bench import batches_of, bench, micro_batches_of
    from leaven.training.engine import check_trainable

    tokens = prepare_text(loaded.data, loaded.model.vocab_size)
    check_trainable(loaded, tokens)
    with stop_on_signal() as stop, LiveScreen() as screen:
        document = bench(
            loaded,
            tokens,
            sorted(set(micro_batch or micro_batches_of(loaded))),
            sorted(set(global_batch or batches_of(loaded))),
            limit_seconds=seconds,
            share=share,
            on_row=screen.counts("measuring"),
            stop=stop,
        )
        interrupted = stop()
    if document.rows or json_output:
        best = document.choose
        sets = [*(overrides or ()), f"batch.micro_batch={best.micro_batch}"] if best else []
        following = [next_commands.launch(recipe, sets)] if sets else []
        print_document(document, bench_screen(document, loaded.model.seq_len), json_output, following)
    if interrupted:
        exit_interrupted(
            "stopped before everything was measured; nothing is saved, so the same command starts from the beginning"
        )
    if not document.rows:
        raise InputError(
            "all tried micro-batches are larger than the global batch or do not fit in memory; type --micro-batch 1"
        )
