"""Defines the commands of ``leaven check``. The options that they share are in check_options.py."""

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leaven.cli import next_commands
from leaven.cli.check_options import LoggedRunOptions, RecipeRunOptions, RunOptions, SizeOptions, with_option_fields
from leaven.cli.common import (
    JsonOption,
    RecipeArgument,
    SetOption,
    group,
    list_option,
    load_recipe,
    number_above_0,
    option,
    parsed_option,
    print_document,
    require_alone,
    require_new,
)
from leaven.errors import InputError
from leaven.recipe.files import read_text, write_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_number
from leaven.scaling.rules import RULES
from leaven.views.terminal.checks import memory_screen
from leaven.views.terminal.console import warn
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.model_instance import RunScale

app = group()


def _scale(text: str) -> "RunScale":
    from leaven.verification.model_instance import RunScale

    width, _, depth = text.strip().partition("x")
    if not (width.isdigit() and depth.isdigit() and int(width) and int(depth)):
        raise InputError(f"{text} is not a size; give WIDTHxDEPTH, e.g. 64x4")
    return RunScale(int(width), int(depth))


FactorOption = Annotated[Any, parsed_option(number_above_0, "FLOAT", "Multiply every lr by this number.")]
SCALES = "Model sizes as WIDTHxDEPTH, separated by commas. The first is the base, from which the rule scales."
ScalesOption = Annotated[Any, list_option(_scale, SCALES)]
ScaleOption = Annotated[
    Any, parsed_option(_scale, "WIDTHxDEPTH", "Size of the model as WIDTHxDEPTH, e.g. 64x4.", "the recipe's")
]
LossOption = Annotated[
    str, option("With LOGS, the column of the loss, or its tag in TensorBoard or W&B.", metavar="NAME")
]
LrsOption = Annotated[
    Any,
    list_option(
        number_above_0,
        "Learning rates to try at the base size, separated by commas. For module:factory, factors on the model's lr.",
        "1/4 to 4 times the recipe's",
    ),
]
DurationsOption = Annotated[
    Any, list_option(number_above_0, "Lengths of runs as multiples of the recipe's length, separated by commas.")
]
BatchesOption = Annotated[
    Any, list_option(number_above_0, "Batch sizes as multiples of the recipe's batch size, separated by commas.")
]


@app.command()
@with_option_fields
def coordinates(
    options: SizeOptions,
    steps: Annotated[
        int,
        option(
            "Number of training steps on the same batch. With more than 3 steps, activations may depend a little "
            "more on width and depth.",
            min=1,
        ),
    ] = 3,
    lr_factor: FactorOption = "1",
) -> None:
    """Check that activations and their updates keep their size as width and depth grow (coordinate check).

    The small models have the architecture, the optimizer and the scaling rule of the recipe. The smallest width and
    depth are the base size of the rule. The check changes the initial weights, so that the activations of its
    small models depend on width and depth in the same way as those of large models.
    """
    from leaven.verification.coordinates import CoordinateCheck

    document = options.train(CoordinateCheck, steps, lr_factor)
    recipe = options.read()
    following = []
    if document.passed and isinstance(recipe, Recipe):
        following = next_commands.after_coordinates(Path(options.subject), recipe, options.overrides or ())
    options.finish(document, following=following)


@app.command()
@with_option_fields
def gradients(
    options: SizeOptions,
    steps: Annotated[
        int,
        option("Number of training steps. From 150 steps on, QK-norm gains that heads share are checked too.", min=1),
    ] = 20,
    lr_factor: FactorOption = "0.125",
) -> None:
    """Check that Adam's eps scales with the gradients, and that every parameter is updated.

    The check also computes, without training, how the rule changes the optimizer's settings with width, depth, batch
    size and run length. Three combinations must not change: lr x eps x (number of weights), lr x weight decay x
    steps, and the half-lives of the betas as shares of the run. The lr must grow as the square root of the batch
    size.
    """
    from leaven.verification.gradients import GradientCheck

    options.finish(options.train(GradientCheck, steps, lr_factor))


@app.command()
def memory(
    context: typer.Context,
    recipe: RecipeArgument,
    layout: Annotated[
        str | None,
        option(
            "The layout to check, e.g. tp=8,pp=12,dp=4,zero=1,mbs=2,recompute=full.",
            "the recipe's",
            metavar="KEY=VALUE,...",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        option(
            "Check this rank. Repeatable.",
            "one rank in each of the first, second and last stage",
            names="--rank",
            min=0,
        ),
    ] = None,
    all_stages: Annotated[bool, option("Check one rank of every pipeline stage.", names="--all-stages")] = False,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compare the planned memory of a rank with the memory of two simulated training steps.

    The simulation runs the real model, layout and optimizer on this machine's CPU. Its tensors have shapes
    but no data. The check passes if the planned memory is within 2% of the simulated memory between the two
    steps, and within 5% of the simulated peak.
    """
    from leaven.verification.memory import arrangement, check_memory, ranks_to_check, rehearsal, with_layout

    if all_stages:
        require_alone(context, "--all-stages", "ranks")
    laid_out = load_recipe(recipe, overrides)
    if layout is not None:
        laid_out = with_layout(laid_out, layout)
    short = rehearsal(laid_out)
    wanted = ranks_to_check(short.layout, ranks, all_stages)
    with LiveScreen() as screen:
        screen.line(f"{arrangement(short)} · rank {', '.join(map(str, wanted))} of {short.layout.ranks}")
        check = check_memory(short, wanted, screen.counts("ranks"))
    print_document(check, memory_screen(check), json_output)
    if not check.passed:
        raise typer.Exit(1)


@app.command()
@with_option_fields
def transfer(
    options: LoggedRunOptions,
    context: typer.Context,
    scales: ScalesOption = None,
    lrs: LrsOption = None,
    value: Annotated[
        str, option("With LOGS, the column with the values of the swept hyperparameter.", metavar="COLUMN")
    ] = "lr",
    loss: LossOption = "loss",
) -> None:
    """Check that the best lr of a small model is also the best lr of a larger model.

    Or check runs that you have trained, for any hyperparameter. Each row of LOGS is a run. Its columns are loss, lr
    (or the column of --value), at least one of width, depth, batch and tokens, and optionally seed. The loss of a
    diverged run is nan. LOGS may also be a folder with the run folders of leaven, TensorBoard or W&B (offline). In
    this case, the name of each run folder must contain the size, value and seed, e.g. width256-lr0.004-seed1.
    """
    if logs := options.logs(context, "value loss"):
        from leaven.verification.logged_runs import transfer_of_runs

        options.finish(transfer_of_runs(logs, value, loss))
        return
    family, _ = options.models(scales[0])
    options.sweep("transfer", family, "lr", lrs, scales)


@app.command()
@with_option_fields
def collapse(
    options: LoggedRunOptions,
    context: typer.Context,
    scales: ScalesOption = None,
    irreducible: Annotated[
        float | None,
        option(
            "The irreducible loss, if you know it, e.g. from a scaling law. By default, it is fitted.",
            metavar="NATS",
            min=0,
        ),
    ] = None,
    loss: LossOption = "loss",
) -> None:
    """Check that the normalised loss curves of several sizes coincide.

    A normalised loss is (loss - irreducible loss) / (final loss - irreducible loss). The check trains the recipe at
    each size, with the same number of steps and the same number of tokens per parameter.

    It can also check runs that you have trained. LOGS is then a file, a folder of files, or a folder of run folders
    (of leaven, TensorBoard or offline W&B). A file needs a column loss, and a column tokens or step. If a file has
    several runs, it also needs columns for the size (width, depth or batch) and the seed. If every run has its own
    file, put the files of each size into a subfolder.
    """
    if logs := options.logs(context, "loss"):
        from leaven.verification.logged_runs import collapse_of_runs

        options.finish(collapse_of_runs(logs, irreducible, loss))
        return
    from leaven.verification.collapse import collapse_of_family

    family, _ = options.models(scales[0])
    options.finish(
        options.train(
            lambda store: collapse_of_family(family, scales, store, seeds=options.seeds, irreducible=irreducible)
        )
    )


@app.command()
@with_option_fields
def duration(
    options: RunOptions,
    durations: DurationsOption = "1,2,4",
    scale: ScaleOption = None,
    lrs: LrsOption = None,
    write: Annotated[
        Path | None,
        option("Write a copy of the recipe with the measured token_exponent to this file.", metavar="OUT.toml"),
    ] = None,
) -> None:
    """Check that the best lr changes with the run length as the scaling rule says. Measure the rule's
    token_exponent."""
    from leaven.data.tokens import prepare
    from leaven.verification.duration import duration, measured_exponent

    subject, recipe = options.subject, options.read()
    if write is not None:
        require_new(write)
        if not isinstance(recipe, Recipe):
            raise InputError(
                f"{recipe}: --write needs a recipe; for other models, pass token_exponent to leaven.parametrize"
            )
        rule = recipe.scaling.rule
        if "lr" not in RULES[rule].columns:
            raise InputError(
                f"--write needs a rule that scales with tokens, and {rule} does not; "
                "type --set scaling.rule=complete-d-p"
            )
    family, size = options.models(scale)
    if isinstance(recipe, Recipe):
        tokens = prepare(recipe.data, recipe.model.vocab_size)  # again, from the cache
        epochs = max(tokens.epochs(round(recipe.data.tokens * max(durations))).values())
        if epochs > 1:
            warn([f"the longest runs read text {epochs:.2g} times, so their loss differs from a loss on new text"])
    document = options.train(lambda store: duration(family, size, durations, lrs, store, seeds=options.seeds))
    measured, more = measured_exponent(document, options.run), []
    if write is not None and measured is not None and isinstance(recipe, Recipe):
        require_new(write)  # the file may have been written during the check
        changed = recipe.replace(measured)
        write_recipe(changed, write, template=read_text(Path(subject)))
        exponent = f"token_exponent {changed.scaling.token_exponent:g}"
        more = [
            f"wrote {write} with {exponent}; next: leaven transfer {quote(str(write))} --tokens TOKENS -o big.toml"
        ]
        if (longer := recipe.data.tokens / recipe.base.tokens) != 1:
            factor = longer ** (recipe.scaling.token_exponent - changed.scaling.token_exponent)
            more[:0] = [
                f"the new exponent changes this recipe's values, e.g. lr x{format_number(factor)}, because its run "
                f"has {format_number(longer)} times the tokens of the base; see leaven show {quote(str(write))}"
            ]
    elif write is not None:
        more = [f"{write} is not written, because no exponent with a 95% interval was measured; see the advice above"]
    elif measured is not None and isinstance(recipe, Recipe) and "lr" in RULES[recipe.scaling.rule].columns:
        output = next_commands.free(Path("measured.toml"))
        more = [f"to write the measured exponent to a recipe: {next_commands.again('--write', str(output))}"]
    options.finish(document, *more)


@app.command()
@with_option_fields
def batch(
    options: RunOptions, batches: BatchesOption = "0.5,1,2,4", scale: ScaleOption = None, lrs: LrsOption = None
) -> None:
    """Check that the best lr changes with the batch size as the scaling rule says, at equal tokens."""
    family, size = options.models(scale)
    options.sweep("batch", family, "lr", lrs, [replace(size, batch=ratio) for ratio in (1.0, *batches)])


@app.command()
@with_option_fields
def decay(
    options: RecipeRunOptions,
    scales: Annotated[Any, list_option(_scale, SCALES, "the recipe's")] = None,
    durations: DurationsOption = "1",
    decays: Annotated[
        Any,
        list_option(
            number_above_0,
            "Weight decays to try, at the base size, separated by commas.",
            "1/16 to 16 times the recipe's",
        ),
    ] = None,
) -> None:
    """Check that the best weight decay of a small model is also the best for a larger model or a longer run."""
    sizes = scales or []
    if len(sizes) < 2 and not {*durations} - {1.0}:
        raise InputError(
            "there is nothing to compare; give a second size or length: --scales 64x4,128x4 or --durations 1,2,4"
        )
    family, base = options.models(sizes[0] if sizes else None)
    every = [base, *sizes, *(replace(base, tokens=ratio) for ratio in durations)]
    options.sweep("decay", family, "weight_decay", decays, every)


@app.command()
@with_option_fields
def init(
    options: RecipeRunOptions,
    scales: ScalesOption,
    stds: Annotated[
        Any,
        list_option(
            number_above_0, "Init stds to try, at the base size, separated by commas.", "1/4 to 4 times the recipe's"
        ),
    ] = None,
) -> None:
    """Check that the best init std of a small model is also the best init std of a larger model."""
    family, _ = options.models(scales[0])
    options.sweep("init", family, "init_std", stds, scales)


@app.command()
@with_option_fields
def equivalence(options: RunOptions, batch_ratios: BatchesOption = "0.25,0.5,2,4", scale: ScaleOption = None) -> None:
    """Check that runs with different batch sizes reach the same loss if the scaling rule adapts the hyperparameters.

    Without the rule, the losses must differ. The rule is exact only for many steps with noisy gradients. Choose small
    batches, and at least 200 steps with the largest batch.
    """
    from leaven.verification.equivalence import FACTORY_TOKENS, equivalence

    family, size = options.models(scale, FACTORY_TOKENS)
    options.finish(options.train(lambda store: equivalence(family, size, batch_ratios, store, seeds=options.seeds)))
