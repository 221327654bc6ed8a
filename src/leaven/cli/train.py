"""leaven train RECIPE"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leaven.cli._common import JsonOption, RecipeArgument, SetOption, console, emit_json, errors, load, stopping
from leaven.cli._screens import TextScreen, TrainScreen, summary_line


def train_(
    recipe: RecipeArgument,
    run: Annotated[Path | None, typer.Option(help="The run's folder (runs/NAME).", show_default=False)] = None,
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Train a recipe. The same command again resumes it, with the same losses to the last bit."""
    loaded = load(recipe, overrides)
    folder = run or Path("runs") / loaded.name

    from leaven.data.tokens import prepare
    from leaven.training.run_folder import RunFolder
    from leaven.training.trainer import Diverged, require_one_device, resolved, train

    require_one_device(loaded)
    RunFolder(folder).check(resolved(loaded, folder))
    with TextScreen() as text:
        tokens = prepare(loaded.data.source, loaded.data.tokenizer, loaded.model.vocab_size, progress=text.update)
    with stopping() as stop, TrainScreen(loaded) as screen:
        try:
            summary = train(
                loaded, tokens, folder, on_step=screen.step, on_event=screen.event, stop=stop, tensorboard=True
            )
        except Diverged as error:
            errors.print(f"stopped: {error}; the last checkpoint is whole. A lower lr or a longer warm-up may help")
            raise typer.Exit(1) from None
    if json_output:
        emit_json({key: value for key, value in asdict(summary).items() if key != "finished"})
    if not summary.finished:
        errors.print(f"stopped at {summary.tokens:,} tokens, saved; the same command goes on from there")
        raise typer.Exit(75)
    if not json_output:
        console.print(summary_line(summary, folder))
