"""Define the command ``leaven tune``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from leaven.cli import next_commands
from leaven.cli.common import (
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    count_above_0,
    exit_interrupted,
    list_option,
    load_recipe,
    prepare_text,
    print_document,
    require_alone,
    stop_on_signal,
)
from leaven.errors import InputError
from leaven.views.terminal.console import errors
from leaven.views.terminal.study import TuneScreen, answer_screen

if TYPE_CHECKING:
    from leaven.tuning.space import Space

TRIALS = 32  # the number of trials if no budget is given


def tune(
    context: typer.Context,
    recipe: RecipeArgument,
    study: Annotated[
        str,
        typer.Option(
            metavar="DIR_OR_URL",
            help="The folder of the study, or a database that several machines share: "
            "postgresql://USER@HOST/DATABASE or sqlite:///FILE.",
        ),
    ],
    trials: Annotated[
        int | None, typer.Option(min=1, help="Total number of trials, including finished ones.", show_default="32")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Total FLOP budget of all trials, e.g. 1e18.", show_default="no limit")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            help="Time budget in hours. An hour in which several machines run trials counts as one hour.",
            show_default="no limit",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="Search algorithm: trust-region, random, grid, tpe, cma or gp.")
    ] = "trust-region",
    space: Annotated[
        str | None,
        typer.Option(
            help="The values to search: global (values for the whole model, e.g. lr), global-full (also schedule, "
            "clipping, dropout and optimizer), per-module (about 25 values), per-module-full (about 90 values), or "
            "keys of the recipe separated by commas, e.g. hyperparameters.lr.",
            show_default="the tuning section of the recipe, else global",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of worker processes, each with one thread.",
            show_default="one per core, or 1 on a GPU",
        ),
    ] = None,
    stack: Annotated[
        int | None,
        typer.Option(
            min=1, hidden=True, help="Resume a study that was started with --stack (several trials in one process)."
        ),
    ] = None,
    durations: Annotated[
        Any,
        list_option(
            count_above_0,
            "Lengths in tokens: each trial gives a loss for each length, as branches of one run (only for the wsd "
            "schedule).",
            metavar="COUNT,COUNT",
        ),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=100,
            help="The standard deviation of the loss between seeds, in nats, e.g. from an earlier study of this "
            "recipe. Without this option, some trials repeat the first trial with other seeds to measure it.",
            show_default="measured in studies of 12 trials or more",
        ),
    ] = None,
    prior: Annotated[
        Literal["laws"] | None,
        typer.Option(
            metavar="laws",
            help="laws: begin at the values that published laws and runs predict to be best. A prediction that the "
            "trials contradict is dropped.",
            show_default="none",
        ),
    ] = None,
    from_study: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder of an earlier study, e.g. of a smaller model with the same scaling.base and "
            "scaling.rule. Its trials and its noise are prior knowledge for this search.",
            show_default="none",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results if --study is a URL.", show_default="studies/NAME"),
    ] = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    loaded = load_recipe(recipe, overrides)

    from leaven.planning.hardware import cores
    from leaven.training.device import default_device
    from leaven.tuning.service.stores import StoreGone
    from leaven.tuning.service.study import Study, check_request
    from leaven.tuning.space import space as space_of

    searched = space_of(loaded, space)
    if prior is not None:
        searched = _with_laws(searched)
    if not study:
        raise InputError("--study is empty; give a folder, or the URL of a database")
    url, folder = (study, out or Path("studies", loaded.name)) if "://" in study else (None, Path(study))
    if trials is None and flops is None and hours is None:
        trials = TRIALS
    given: dict[str, Any] = {"durations": durations or (), "noise": noise, "from_study": from_study}
    check_request(loaded, searched, method, trials=trials, flops=flops, hours=hours, **given)
    workers = workers or (cores() if default_device().type == "cpu" else 1)
    if (stack or 1) > 1:
        require_alone(context, "--stack", "durations")
        searched = _as_of_stacks(searched)
    tokens = prepare_text(loaded.data, loaded.model.vocab_size)
    try:
        study_of = Study(folder, loaded, searched, method, tokens, url, **given)
        with stop_on_signal() as stop, study_of as opened:
            for path, reason in opened.space.left_out:
                errors.print(f"not searched: {path}: {reason}")
            with TuneScreen(opened.state(), trials, workers, flops=flops, hours=hours) as screen:
                state = opened.run(trials, workers, flops=flops, hours=hours, screen=screen, stop=stop)
            interrupted = stop()
    except StoreGone as gone:
        exit_interrupted(str(gone))
    following = next_commands.after_tune(recipe, folder) if state.best is not None and not interrupted else []
    document = state.summary(folder / "best.toml")
    if json_output or following:
        print_document(document, answer_screen(state, folder, trials), json_output, following)
    if interrupted:
        exit_interrupted(f"stopped after {document.trials} trials; run the same command again to resume")
    if state.best is None:
        errors.print(opened.nothing)
        raise typer.Exit(1)


def _with_laws(space: "Space") -> "Space":
    """Return the search space with prior knowledge: the optimal values that laws and published runs suggest.

    The suggested values are also printed.
    """
    from leaven.catalogue.expectations import expectations
    from leaven.catalogue.findings.case import Case
    from leaven.recipe.units import format_number
    from leaven.scaling.table import parameter_table

    recipe = space.recipe
    known = expectations(Case(recipe, parameter_table(recipe).rows))
    informed = space.expecting(known)
    if not any(each.expected for each in informed.dimensions):
        raise InputError(
            f"--prior laws: laws predict only {', '.join(known)}, and the study searches none of these; leave out "
            "--prior"
        )
    for each in informed.dimensions:
        if each.expected and isinstance(each.centre, float):
            value, factor = each.centre * 2 ** each.expected[0], 2 ** each.expected[1]
            errors.print(f"expected: {each.path} {format_number(value)}, times or divided by {factor:.1f}")
    return informed


def _as_of_stacks(space: "Space") -> "Space":
    """Return the search space of a study that was started with the obsolete option --stack, to resume the study.

    With --stack, a process trained several trials at once. The trials needed one batch size, one duration and no
    dropout, so the space does not contain batch size, duration and dropout.
    """
    from leaven.tuning.point import BATCH, DROPOUT, TOKENS

    errors.print(
        "--stack is obsolete, because each worker now runs one trial; set --workers to run more trials at once"
    )
    for path, need in ((BATCH, "the same batch size"), (TOKENS, "the same duration"), (DROPOUT, "no dropout")):
        space = space.without(path, f"stacked trials must have {need}")
    return space
