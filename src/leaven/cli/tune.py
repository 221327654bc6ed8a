"""Defines the command ``leaven tune``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    DeviceOption,
    JsonOption,
    SetOption,
    argument,
    count_above_0,
    exit_interrupted,
    list_option,
    load_recipe,
    option,
    parsed_option,
    prepare_text,
    print_document,
    require_alone,
    stop_on_signal,
)
from leaven.errors import InputError
from leaven.views.terminal.console import errors, warn
from leaven.views.terminal.study import TuneScreen, answer_screen, expected_values

if TYPE_CHECKING:
    from leaven.recipe.recipe import Recipe
    from leaven.tuning.command import Command, CommandSpace
    from leaven.tuning.service.recipe_study import Study
    from leaven.tuning.space import Space

AUTO = 0  # stands for --workers auto
TRIALS = 32  # the number of trials if no budget is given
WITHOUT_COMMAND = "durations flops stack device"  # options that a study over a command does not have


def _workers(text: str) -> int:
    return AUTO if text == "auto" else count_above_0(text)


def tune(
    context: typer.Context,
    recipe: Annotated[
        Path, argument("RECIPE", "A recipe (TOML), or a command file: a command, its loss and its search space.")
    ],
    study: Annotated[
        str,
        option(
            "The folder of the study, or a database that several machines share: postgresql://USER@HOST/DATABASE or "
            "sqlite:///FILE.",
            metavar="DIR_OR_URL",
        ),
    ],
    trials: Annotated[int | None, option("Total number of trials, including finished ones.", "32", min=1)] = None,
    flops: Annotated[float | None, option("Total FLOP budget of all trials, e.g. 1e18.", "no limit")] = None,
    hours: Annotated[
        float | None,
        option("Time budget in hours. An hour in which several machines run trials counts as one hour.", "no limit"),
    ] = None,
    method: Annotated[
        str, option("Search algorithm: trust-region, random, grid (at most 100,000 points), tpe, cma or gp.")
    ] = "trust-region",
    space: Annotated[
        str | None,
        option(
            "The values to search: global (values for the whole model, e.g. lr), global-full (also schedule, "
            "clipping, dropout and optimizer), per-module (about 25 values), per-module-full (about 90 values), or "
            "keys of the recipe separated by commas, e.g. hyperparameters.lr.",
            "the tuning section of the recipe, or global",
        ),
    ] = None,
    command: Annotated[
        str | None,
        option(
            "Run this shell command instead of leaven's own trainer. Placeholders such as {lr} stand for values of "
            "the recipe, {seed} for the seed and {out} for an empty folder.",
            "leaven's own trainer",
            metavar="TEXT",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        option(
            "With --command: a regular expression for the losses in its output, with {loss} for the number and "
            "{step} for the step, e.g. 'step {step}: val loss {loss}'.",
            default=False,
            metavar="PATTERN",
        ),
    ] = None,
    workers: Annotated[
        Any,
        parsed_option(
            _workers,
            "COUNT|auto",
            "Number of workers. A worker runs one trial at a time, or several with --stack. For a recipe, a worker "
            "is a process with one thread and, on a machine with GPUs, its own GPU. auto: one worker for each GPU of "
            "this machine; for a recipe, leaven then also chooses --stack. leaven sets CUDA_VISIBLE_DEVICES to the "
            "worker's GPU.",
            "1 on a GPU and for a command, otherwise one per core",
        ),
    ] = None,
    stack: Annotated[
        int | None,
        option(
            "Number of trials that a worker trains at once, as one batched model: many times faster for small "
            "models on a GPU, but not on a CPU. Batch size, run length and dropout are then not searched. More than "
            "1/12 of --trials at once makes the search worse.",
            "1; with --workers auto, chosen",
            metavar="COUNT",
            min=1,
        ),
    ] = None,
    durations: Annotated[
        Any,
        list_option(
            count_above_0,
            "Run lengths in tokens. Each trial gives a loss for each length: shorter runs branch off the longest. "
            "Only for the wsd schedule.",
            metavar="COUNT,COUNT",
        ),
    ] = None,
    noise: Annotated[
        float | None,
        option(
            "The standard deviation of the loss between seeds, in nats, e.g. from an earlier study of this recipe. "
            "Without this option, some trials repeat the first trial with other seeds.",
            "measured in studies of 12 trials or more",
            min=0,
            max=100,
        ),
    ] = None,
    prior: Annotated[
        Literal["laws"] | None,
        option(
            "laws: begin at the values that published laws and runs predict to be best. A prediction that the "
            "trials contradict is dropped.",
            "none",
            metavar="laws",
        ),
    ] = None,
    from_study: Annotated[
        Path | None,
        option(
            "The folder of an earlier study, e.g. of a smaller model with the same scaling.base and scaling.rule. "
            "Its trials and its noise are prior knowledge for this search.",
            "none",
            metavar="DIR",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Folder for the results if --study is a URL.", "studies/NAME", metavar="DIR")
    ] = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    from leaven.tuning.earlier_study import unlike_earlier
    from leaven.tuning.service.command_study import CommandStudy
    from leaven.tuning.service.stores import StoreGone
    from leaven.tuning.service.study import BaseStudy
    from leaven.tuning.space import SearchSpace

    if trials is None and flops is None and hours is None:
        trials = TRIALS
    budget: dict[str, Any] = {"flops": flops, "hours": hours}
    program, of_file = _command(context, recipe, command, loss, overrides)
    searched: SearchSpace
    if of_file is not None:
        searched = of_file
    else:
        searched = around = _space(_of_longest(load_recipe(recipe, overrides), durations), space, prior)
    url, folder = _where(study, out, searched.name)
    asked, devices = workers, _devices(workers, program)
    workers = len(devices) or workers or (1 if program else _usual_workers())
    given: dict[str, Any] = {"noise": noise, "from_study": from_study}
    if program is not None:
        study_of: BaseStudy = CommandStudy(folder, program, searched, method, url, **given)
        study_of.check_budget(trials, hours)
    else:
        given["durations"] = durations or ()
        if stack is not None and stack > 1:
            require_alone(context, "--stack", "durations")
        gpus = len(devices) if asked == AUTO and stack is None else 0
        study_of = _study_of_recipe(around, method, folder, url, {"trials": trials, **budget}, stack, gpus, given)
    try:
        with stop_on_signal() as stop, study_of.reporting_to(errors.print, stop) as opened:
            if from_study is not None:
                warn(unlike_earlier(from_study, opened.space))
            for path, reason in opened.space.left_out:
                errors.print(f"not searched: {path}: {reason}")
            with TuneScreen(opened.state(), trials, workers, stack=opened.stack) as screen:
                state = opened.run(trials, workers, **budget, devices=devices, screen=screen, stop=stop)
            interrupted = stop()
    except StoreGone as gone:
        exit_interrupted(str(gone))
    following = (
        next_commands.after_tune(recipe, folder, state.best_command)
        if state.best is not None and not interrupted
        else []
    )
    document = state.summary(folder / "best.toml")
    if json_output or following:
        print_document(document, answer_screen(state, folder, trials), json_output, following)
    if interrupted:
        exit_interrupted(f"stopped after {document.trials} trials; run the same command again to resume")
    if state.best is None:
        errors.print(opened.nothing)
        raise typer.Exit(1)


def _of_longest(recipe: "Recipe", durations: list[int] | None) -> "Recipe":
    if not durations or recipe.data.tokens == max(durations):
        return recipe
    warn([f"data.tokens {recipe.data.tokens:,} is replaced by {max(durations):,}, the longest of --durations"])
    why = recipe.why | {"data.tokens": "the longest of --durations"}
    return recipe.replace({"data.tokens": max(durations), "why": why})


def _where(study: str, out: Path | None, name: str) -> tuple[str | None, Path]:
    """Return (database URL or None, folder of the results) of a study."""
    if "://" in study:
        return study, out or Path("studies", name)
    if out is not None:
        raise InputError(
            "--out is only for a --study that is a URL; remove --out: the results go into the folder of --study"
        )
    return None, Path(study)


def _command(
    context: typer.Context, path: Path, command: str | None, loss: str | None, overrides: list[str] | None
) -> "tuple[Command | None, CommandSpace | None]":
    """Return the user's training command, if any, and its search space if ``path`` is a command file."""
    from leaven.recipe.files import validated
    from leaven.tuning.command import Command, command_space, is_command_file

    if is_command_file(path):
        require_alone(context, "a command file", f"command loss space prior {WITHOUT_COMMAND}")
        found = command_space(path, overrides)
        return found.file, found
    if command is None:
        if loss is not None:
            raise InputError("--loss needs --command; leave it out to use leaven's own trainer")
        return None, None
    require_alone(context, "--command", WITHOUT_COMMAND)
    if loss is None:
        raise InputError("--command needs --loss PATTERN, as in --loss 'step {step}: val loss {loss}'")
    return validated(Command, {"command": command, "loss": {"pattern": loss}}, "--command"), None


def _space(recipe: "Recipe", which: str | None, prior: str | None) -> "Space":
    """Return the search space around a recipe. With ``prior``, add the optima that laws predict, and print them."""
    from leaven.tuning.space import space as space_of

    if prior is None:
        return space_of(recipe, which)
    found = space_of(recipe, which).with_laws()
    errors.print(*expected_values(found.dimensions), sep="\n")
    return found


def _devices(workers: int | None, command: "Command | None") -> tuple[str, ...]:
    """Return the value of CUDA_VISIBLE_DEVICES for each worker, or () if every worker may use all GPUs."""
    from leaven.planning.this_machine import devices_here, devices_of_workers

    if command is not None and command.devices:
        return devices_of_workers(None if workers == AUTO else workers or 1, command.devices)
    if workers == AUTO:
        return devices_of_workers(None)
    if workers is None or command is not None:
        return ()
    from leaven.training.device import default_device

    return devices_of_workers(workers) if default_device().type == "cuda" and devices_here() else ()


def _usual_workers() -> int:
    from leaven.planning.this_machine import cores
    from leaven.training.device import default_device

    return cores() if default_device().type == "cpu" else 1


def _study_of_recipe(
    searched: "Space",
    method: str,
    folder: Path,
    url: str | None,
    budget: dict[str, Any],
    stack: int | None,
    gpus: int,
    given: dict[str, Any],
) -> "Study":
    """Return the study of a recipe, after checking the arguments, because tokenising its text may take long.

    With ``gpus``, the number of CUDA GPUs, leaven chooses how many trials each of them trains at once.
    """
    from leaven.training.device import default_device, free_memory
    from leaven.tuning.service.recipe_study import Study, check_request, stack_size, stackable

    if stack is not None and stack > 1:
        searched, why = stackable(searched)
        stack = 1 if why else min(stack, budget["trials"] or stack)
        if why:
            errors.print(f"each worker trains one trial at a time: {why}")
    recipe = searched.recipe
    check_request(recipe, searched, method, **budget, **given)
    at_once, device = stack or 1, default_device()
    if gpus and device.type == "cuda":
        at_once, why = stack_size(searched, given["durations"], budget["trials"], gpus, lambda: free_memory(device))
        number = f"{at_once} trials at once" if at_once > 1 else "one trial at a time"
        errors.print(f"each GPU trains {number}: {why}")
    tokens = prepare_text(recipe.data, recipe.model.vocab_size, recipe)
    return Study(folder, recipe, searched, method, tokens, url, **given, stack=at_once)
