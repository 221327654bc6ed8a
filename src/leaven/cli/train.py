"""Defines the command ``leaven train``. :mod:`leaven.training.trainer` lists its steps and their source files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    count_option,
    exit_interrupted,
    load_recipe,
    option,
    prepare_text,
    print_document,
    stop_on_signal,
)
from leaven.errors import InputError
from leaven.planning.trainable import layout_cautions, require_trainable, resized
from leaven.recipe.units import parse_quantity
from leaven.scaling.tested_ranges import warnings
from leaven.views.terminal.console import errors, warn
from leaven.views.terminal.training import TrainScreen, advice, stopped, trained

if TYPE_CHECKING:
    from leaven.training.run_folder import RunFolder


def train(
    recipe: RecipeArgument,
    run: Annotated[
        Path | None,
        option(
            "The run folder to write. Under torchrun, type --run-folder, because torchrun itself has --run.",
            "runs/NAME",
            names="--run --run-folder",
        ),
    ] = None,
    log_to: Annotated[
        str | None,
        option(
            "Where to log curves: tensorboard, wandb or trackio (separated by commas), or none.",
            "tensorboard if installed",
            metavar="NAMES",
        ),
    ] = None,
    log_every: Annotated[
        int | None,
        option(
            "Print a line after every STEPS steps.", "after each validation and each minute", metavar="STEPS", min=1
        ),
    ] = None,
    rewind_to: Annotated[
        int | None,
        count_option(
            "Rewind to the newest checkpoint at or before this number of tokens, and delete later checkpoints.",
            parse=parse_quantity,  # 0 is the checkpoint of the initial weights
        ),
    ] = None,
    skip_tokens: Annotated[
        int | None,
        count_option(
            "With --rewind-to: leave out this many tokens of the data that follow the checkpoint.",
            parse=parse_quantity,
        ),
    ] = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """With --rewind-to, you may change the run's schedule, stability, evaluation and optimizer settings, in the
    recipe or with --set."""
    if skip_tokens is not None and rewind_to is None:
        raise InputError("--skip-tokens needs --rewind-to COUNT, which says where skipping begins")
    loaded = load_recipe(recipe, overrides)
    folder = run or Path("runs") / loaded.name

    from leaven.distributed.exchange import rank_zero_first
    from leaven.distributed.process_group import join_process_group, rank, world_size
    from leaven.interop.weights import require_start
    from leaven.training import trainer
    from leaven.training.device import default_device
    from leaven.training.loop import Diverged
    from leaven.training.metrics import writers
    from leaven.training.rewind import ManualRewind
    from leaven.training.run_folder import RunFolder

    layout_is_set = any(change.startswith("layout.dp=") for change in overrides or ())
    if "WORLD_SIZE" in os.environ and not layout_is_set and RunFolder(folder).recipe_file.exists():
        loaded = resized(loaded, world_size())  # torchrun has lost a node, or got it back
    require_trainable(loaded, world_size())
    if loaded.start.folder is not None and not RunFolder(folder).begun:  # raise errors before hours of tokenising
        require_start(loaded.model, loaded.start.folder)
    _exit_if_stopped_on_purpose(RunFolder(folder))
    curves = writers(log_to)
    rewind = ManualRewind(rewind_to, skip_tokens or 0) if rewind_to is not None else None
    # Before hours of tokenising. `trainer.train` checks again, because the folder may change.
    trainer.check(loaded, folder, rewind)
    if rewind is not None and rewind.done(RunFolder(folder), loaded):
        warn([f"--rewind-to {rewind_to} was already done by an earlier command, so the run resumes where it is"])
    warn([*(each.message for each in warnings(loaded)), *layout_cautions(loaded)])
    with join_process_group(loaded.layout, default_device()) as group:
        tokens = rank_zero_first(group, lambda: prepare_text(loaded.data, loaded.model.vocab_size, loaded))
        with stop_on_signal() as stop, TrainScreen(loaded, log_every) as screen:
            try:
                summary = trainer.train(
                    loaded,
                    tokens,
                    folder,
                    on_step=screen.step,
                    on_event=screen.event,
                    stop=stop,
                    log_to=curves,
                    rewind=rewind,
                    group=group,
                )
            except Diverged as error:
                errors.print(f"stopped: {error}\n{advice(folder)}")
                raise typer.Exit(1) from None
    if (summary.finished or json_output) and rank() == 0:
        following = next_commands.after_train(folder, loaded) if summary.finished else []
        print_document(summary, trained(summary, folder) if summary.finished else (), json_output, following)
    if not summary.finished:
        exit_interrupted(stopped(summary))


def _exit_if_stopped_on_purpose(run: "RunFolder") -> None:
    """Exit if the run was stopped under this torchrun, so that torchrun does not resume the run by itself."""
    from leaven.training.integrity import begun_under_torchrun

    events = run.events() if begun_under_torchrun(run) else []
    if events and (last := events[-1])["event"] == "stop":
        errors.print(
            f"the run in {run.path} has stopped ({last['why']}) and is not restarted automatically; to resume it, "
            "run the same command again"
        )
        raise typer.Exit(75 if last["why"] == "interrupted" else 1)
