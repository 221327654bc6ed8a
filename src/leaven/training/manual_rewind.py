"""Returns a run to an earlier checkpoint at the user's request (a rewind): ``leaven train --rewind-to``."""

from dataclasses import asdict, dataclass

from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.recipe.units import format_quantity
from leaven.training.checkpoint import read_checkpoint
from leaven.training.recipe_changes import (
    HYPERPARAMETERS,
    SECTIONS,
    changeable,
    changes_of,
    describe_changes,
    recorded_changes,
)
from leaven.training.rewind import Rewind, position
from leaven.training.run_folder import RunFolder, checkpoints, locked_folder, tokens_of


@dataclass(frozen=True)
class ManualRewind:
    """A user's request that a run continues from an earlier checkpoint."""

    rewind_to: int  # trained tokens: use the newest undamaged checkpoint at or before this count
    skip_tokens: int = 0  # tokens of data to skip after the checkpoint, rounded up to whole sequences

    def done(self, run: RunFolder, recipe: Recipe) -> bool:
        """Return whether this rewind has been done already. It has been done if the run's last manual rewind had the
        same arguments, and the recipe has not changed since. Then the run is resumed without another rewind."""
        returns = [event for event in run.events() if event["event"] == "rewind"]
        return bool(returns) and returns[-1]["asked"] == asdict(self) and not changes_of(run.recipe(), recipe)

    def check(self, run: RunFolder, recipe: Recipe) -> None:
        """Raise InputError if the folder has no run or no suitable checkpoint, or if the recipe changes a value that
        must stay the same during a run."""
        if not run.recipe_file.exists():
            raise InputError(f"--rewind-to: there is no run in {run.path}; give the folder of a run with --run")
        refused = [change for change in changes_of(run.recipe(), recipe) if not changeable(change[0])]
        if refused:
            raise InputError(
                f"--rewind-to: {describe_changes(refused)}; a run can change only [{'], ['.join(SECTIONS)}] and "
                f"{', '.join(HYPERPARAMETERS)} with --rewind-to; for other changes, give a new folder with --run"
            )
        self._target(run)

    def go(self, run: RunFolder, recipe: Recipe) -> None:
        """Record the rewind in the run folder. If the recipe has changed, also write the new recipe. The run uses the
        new recipe from the checkpoint on."""
        with locked_folder(run.path, "run folder"):
            changes = changes_of(run.recipe(), recipe)
            to_tokens, rewinds = self._target(run), run.rewinds()
            start, seq_len = position(rewinds, to_tokens), recipe.model.seq_len
            rewind = Rewind(to_tokens, start, start + -(-self.skip_tokens // seq_len) * seq_len)
            lines = run.metrics()
            at = {key: lines[-1][key] if lines else 0 for key in ("step", "tokens")}
            changed = recorded_changes(changes, recipe) if changes else {"changes": []}
            run.event("rewind", **at, **asdict(rewind), asked=asdict(self), **changed)
            run.require_written()
            if changes:
                run.change_recipe(recipe, changes, f"{to_tokens:,} tokens, by --rewind-to")

    def _target(self, run: RunFolder) -> int:
        to_here = Rewind(self.rewind_to, 0, 0)
        found, _ = read_checkpoint(run.checkpoints, (*run.rewinds(), to_here))
        if found is None:
            there = ", ".join(format_quantity(tokens_of(path)) for path in checkpoints(run.checkpoints))
            raise InputError(
                f"--rewind-to {format_quantity(self.rewind_to)}: no whole checkpoint at or before this count; "
                + (f"there are checkpoints at {there} tokens" if there else "the run folder has none")
            )
        return found.progress.tokens
