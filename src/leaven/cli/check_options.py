"""Defines the options that the commands of ``leaven check`` share, as data classes with methods that run a check."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from leaven.cli.common import (
    JsonOption,
    SetOption,
    argument,
    count_above_0,
    count_option,
    exit_interrupted,
    list_option,
    load_recipe,
    option,
    prepare_text,
    print_document,
    require_alone,
    stop_on_signal,
)
from leaven.documents.checks import CheckDocument
from leaven.errors import InputError
from leaven.planning.this_machine import cores
from leaven.recipe.recipe import Recipe
from leaven.storage import require_page, write_page
from leaven.views.terminal.checks import check_screen
from leaven.views.terminal.console import warn
from leaven.views.terminal.live import LiveScreen

if TYPE_CHECKING:
    from leaven.verification.foreign import ModelFamily
    from leaven.verification.model_instance import Quantity, RunScale
    from leaven.verification.runs import RunStore
    from leaven.verification.size_check import SizeCheck

SubjectArgument = Annotated[
    str, argument("RECIPE", "A recipe file (TOML), or module:factory for your own torch model.")
]
SourceOption = Annotated[
    str | None,
    option(
        "With module:factory, the text to train on: a file, a glob or hf://..., as for data.source in a recipe; "
        "or made-up, for synthetic text.",
        "python-stdlib",
        metavar="TEXT",
    ),
]
RUN_OPTION = option("The folder for the training runs. Run the same command again to resume them.", metavar="DIR")
LOGS = (".csv", ".jsonl", ".wandb")  # suffixes of files with the results of finished runs


def with_option_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with keyword options: one for each field of its first parameter, a data class.

    typer does not support data classes. For example, ``init(options: RecipeRunOptions, scales)`` becomes
    ``init(*, subject, run, scales, seeds=3, ...)``. All of these but ``scales`` are fields of RecipeRunOptions.
    """
    shared, *own = inspect.signature(command).parameters.values()
    fields = inspect.signature(shared.annotation).parameters
    # The order of the options in --help: required fields, the command's own options, other fields.
    required = [field for field in fields.values() if field.default is field.empty]
    optional = [field for field in fields.values() if field.default is not field.empty]
    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*required, *own, *optional)]

    @wraps(command)
    def parsed(**values: Any) -> None:
        command(shared.annotation(**{name: values.pop(name) for name in fields}), **values)

    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {each.name: each.annotation for each in parameters}
    return parsed


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of every check that trains models."""

    subject: SubjectArgument
    # With 1,000 seeds, the noise of a mean is 3% of that of one run. More runs would hardly change a verdict.
    seeds: Annotated[int, option("Number of random seeds for initialisation and data.", min=1, max=1000)] = 3
    output: Annotated[
        Path | None, option("Write an HTML page with charts to this file.", metavar="FILE.html", names="--output -o")
    ] = None
    overrides: SetOption = None
    json_output: JsonOption = False

    for_factories: ClassVar[tuple[str, ...]] = ()  # names of the options that apply only to module:factory

    def __post_init__(self) -> None:
        if self.output is not None:
            require_page(self.output)  # before minutes of training

    def read(self) -> Recipe | str:
        """Return the recipe in the file ``subject``, or ``subject`` itself for a ``module:factory``."""
        if ":" in self.subject and not Path(self.subject).exists():
            if self.overrides:
                raise InputError(
                    f"--set applies only to recipes, not to {self.subject}; set the value in the factory instead"
                )
            return self.subject
        if Path(self.subject).suffix.lower() in LOGS:
            raise InputError(
                f"{self.subject}: this check needs a recipe; only the checks transfer and collapse read logs"
            )
        for name in self.for_factories:
            if getattr(self, name) is not None:
                raise InputError(
                    f"--{name.replace('_', '-')} applies only to module:factory; for a recipe use --set, "
                    "e.g. --set data.tokens=1M"
                )
        return load_recipe(Path(self.subject), self.overrides)

    def finish(self, document: CheckDocument, *more: str, following: Sequence[str] = ()) -> None:
        """Print a check, and write its page to ``--output``. Exit with code 1 if the check failed.

        ``more``: further lines to print. ``following``: commands to suggest after a passed check.
        """
        from leaven.cli import next_commands
        from leaven.views.check_page import check_page

        if not document.passed:
            following = next_commands.after_failed_check(document, getattr(self, "run", None), self.output)
        if self.output is not None:
            write_page(self.output, check_page(document))
            more = (f"wrote {self.output}", *more)
        print_document(document, chain(check_screen(document), more), self.json_output, following)
        if not document.passed:
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class SizeOptions(CheckOptions):
    """Options of the coordinate and gradient checks, which train small models for a few steps."""

    widths: Annotated[
        Any, list_option(count_above_0, "Widths of the models, separated by commas.", "64,128,256,512 or similar")
    ] = None
    depths: Annotated[
        Any,
        list_option(
            count_above_0, "Numbers of layers of the models, separated by commas.", "2,4,8,16; with experts 4,8,16"
        ),
    ] = None
    batch_tokens: Annotated[int | None, option("Batch size in tokens.", "512", min=1)] = None
    source: SourceOption = None
    alpha: Annotated[
        float | None,
        option(
            "With module:factory, the alpha of a model that multiplies its residual branches by depth^-alpha.",
            "1",
            min=0.5,
            max=1,
        ),
    ] = None
    grow_heads: Annotated[
        bool, option("Widen the model with larger heads instead of more heads.", names="--grow-heads")
    ] = False
    for_factories = ("source", "alpha")

    def train(self, kind: "type[SizeCheck[Any]]", steps: int, lr_factor: float) -> CheckDocument:
        subject = self.read()
        _warn_of_start(subject)
        check = kind.of(
            subject,
            prepare_text,
            widths=self.widths,
            depths=self.depths,
            batch_tokens=self.batch_tokens,
            source=self.source,
            alpha=self.alpha,
            grow_heads=self.grow_heads,
            steps=steps,
            seeds=self.seeds,
            lr_factor=lr_factor,
        )
        with LiveScreen() as screen:
            return check.run(screen.counts("models"))


def _warn_of_start(subject: Recipe | str) -> None:
    if isinstance(subject, Recipe) and subject.start.weights:
        warn(["the models of this check start from random weights, because [start] weights have a fixed shape"])


@dataclass(frozen=True, kw_only=True)
class RecipeRunOptions(CheckOptions):
    """Options of the checks that train whole runs of a recipe."""

    subject: Annotated[str, argument("RECIPE", "A recipe file (TOML).")]
    run: Annotated[Path, RUN_OPTION]
    workers: Annotated[
        int | None, option("Number of worker processes, each with one thread.", "one per core", min=1)
    ] = None

    def models(self, scale: "RunScale | None") -> "tuple[ModelFamily, RunScale]":
        """Return the recipe's model family, and a size: ``scale``, or by default the recipe's size."""
        from leaven.verification.model_instance import RunScale
        from leaven.verification.recipe_family import recipe_models

        recipe = self.read()
        if isinstance(recipe, str):
            raise InputError(f"this check does not support module:factory ({recipe}); give a recipe file instead")
        _warn_of_start(recipe)
        return recipe_models(recipe, prepare_text), scale or RunScale(recipe.model.d_model, recipe.model.n_layers)

    def sweep(
        self,
        check: str,
        family: "ModelFamily",
        quantity: "Quantity",
        values: Sequence[float] | None,
        scales: "Sequence[RunScale]",
    ) -> None:
        from leaven.verification.sweep import sweep

        self.finish(
            self.train(lambda store: sweep(check, family, quantity, scales, values, store=store, seeds=self.seeds)[0])
        )

    def train(self, check: "Callable[[RunStore], CheckDocument]") -> CheckDocument:
        from leaven.verification.runs import ChecksStopped, RunStore

        with (
            stop_on_signal() as stop,
            LiveScreen() as screen,
            RunStore(self.run, self.workers or cores(), screen.counts("runs"), stop, note=screen.line) as store,
        ):
            try:
                return store.keep(check(store))
            except ChecksStopped as stopped:
                exit_interrupted(f"stopped: {stopped}; run the same command again to resume from {self.run}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(RecipeRunOptions):
    """Options of the checks that train whole runs of a recipe or of a user's own model."""

    subject: SubjectArgument
    tokens: Annotated[
        int | None,
        count_option("With module:factory, the length of a run in tokens.", "131,072; check equivalence: 524,288"),
    ] = None
    batch_tokens: Annotated[int | None, option("With module:factory, the batch size in tokens.", "512", min=1)] = None
    source: SourceOption = None
    for_factories = ("tokens", "batch_tokens", "source")

    def models(self, scale: "RunScale | None", default_tokens: int | None = None) -> "tuple[ModelFamily, RunScale]":
        from leaven.verification.foreign import foreign

        read = self.read()
        if isinstance(read, Recipe):
            return super().models(scale)
        if scale is None:
            raise InputError(f"{read}: a factory has no default model size; give the size, e.g. --scale 64x4")
        tokens = self.tokens or default_tokens
        family = foreign(read, scale, prepare_text, source=self.source, batch_tokens=self.batch_tokens, tokens=tokens)
        return family, scale


@dataclass(frozen=True, kw_only=True)
class LoggedRunOptions(RunOptions):
    """Options of the checks that train whole runs, or read the results of finished runs."""

    subject: Annotated[
        str,
        argument(
            "RECIPE|LOGS",
            "A recipe file (TOML), or module:factory for your own torch model; or the results of runs that you have "
            "trained with any program: a CSV or JSON lines file, or a folder.",
        ),
    ]
    run: Annotated[Path | None, RUN_OPTION] = None  # type: ignore[assignment]  # :meth:`logs` requires it for training

    def logs(self, context: typer.Context, only_logs: str = "") -> Path | None:
        """Return the path of the logs, or None if the check trains the runs itself. Raise InputError if an option is
        missing or does not fit.

        ``only_logs`` has the names, separated by spaces, of options that are allowed only with logs.
        """
        path = Path(self.subject)
        if path.suffix.lower() in {".tsv", ".txt", ".json"} and path.is_file():
            raise InputError(
                f"{path}: cannot read this format; give the logs as a file that ends in {' or '.join(LOGS)}"
            )
        if path.is_dir() or path.suffix.lower() in LOGS:
            require_alone(context, self.subject, "run scales lrs seeds overrides workers tokens batch_tokens source")
            return path
        require_alone(context, self.subject, only_logs)
        for name, example in (("run", "runs/check"), ("scales", "64x4,128x4")):
            if context.params[name] is None:
                if ":" not in self.subject and not path.exists():
                    raise InputError(f"{path}: no such file or folder; give a recipe, or the results of runs")
                raise InputError(f"--{name} is missing; to train {self.subject}, give e.g. --{name} {example}")
        return None
