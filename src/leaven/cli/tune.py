"""leaven tune RECIPE"""

from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, errors, load, stopping
from leaven.cli._screens import TextScreen
from leaven.cli._tune_screen import TuneScreen, best_lines


def tune(
    recipe: RecipeArgument,
    study: Annotated[Path, typer.Option(metavar="DIR", help="The study's folder.", show_default=False)],
    trials: Annotated[int, typer.Option(min=1, help="How many trials, those that have ended before included.")] = 32,
    method: Annotated[str, typer.Option(help="trust-region, random, tpe, cma or gp.")] = "trust-region",
    space: Annotated[
        str | None,
        typer.Option(
            help="global, per-module (about 30 values), per-module-full (about 90), or paths with commas; "
            "[tuning] of the recipe if not given, or global.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of one thread each (one a core).")] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Search the hyperparameters of a small recipe. The same command again goes on where it was."""
    loaded = load(recipe, overrides)

    from leaven.data.tokens import prepare
    from leaven.training.machine import cores
    from leaven.tuning.space import space as space_of
    from leaven.tuning.study import Study

    searched = space_of(loaded, space)
    with TextScreen() as text:
        tokens = prepare(loaded.data, loaded.model.vocab_size, progress=text.update)
        text.notes(tokens)
    with stopping() as stop, Study(study, loaded, searched, method, tokens) as opened:
        with TuneScreen(opened, trials) as screen:
            state = opened.run(trials, workers or cores(), on_trial=screen.trial, on_rerun=screen.rerun, stop=stop)
        interrupted = stop()
    document = opened.document(state)
    if json_output:
        emit_json(document)
    elif not interrupted:
        for line in best_lines(state, study):
            console.print(line)
    if interrupted:
        errors.print(f"stopped with {document['trials']} of {trials} trials; the same command goes on from there")
        raise typer.Exit(75)
    if state.best is None:
        errors.print("no trial reached the end; lower hyperparameters.lr in the recipe")
        raise typer.Exit(1)
