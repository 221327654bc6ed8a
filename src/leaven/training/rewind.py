"""Defines rewinds, which take a run back to an earlier state: after a spike (:mod:`leaven.training.spikes`), or on
request (:class:`ManualRewind`, ``leaven train --rewind-to``). Does not import torch.

The list of rewinds and the number of trained tokens decide which data are skipped, how the lr is lowered, and which
checkpoints are undone. So a run that resumes from an older checkpoint gets the same result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from leaven.errors import InputError
from leaven.recipe.recipe import BY_REWIND, Recipe
from leaven.recipe.units import format_quantity
from leaven.training.integrity import require_own_files, require_run_of, saved_checkpoints
from leaven.training.run_folder import (
    DAMAGED_EVENTS,
    HYPERPARAMETERS,
    RETURNS,
    SECTIONS,
    WRONG_TYPES,
    LockedFolder,
    RunFolder,
    brief,
    changeable,
    changes_of,
    checkpoint_name,
    checkpoints,
    describe_changes,
    newest_document,
    recorded_changes,
    tokens_of,
)
from leaven.training.run_lines import RunLines

# Key in ``Rewind.asked``. Manual rewinds of older versions lack it, and leave all skipped data skipped.
_TAKES_BACK = "takes_back"


@dataclass(frozen=True)
class Rewind:
    """A return of a run to an earlier state."""

    to_tokens: int  # number of trained tokens to which the run returns
    skip_from: int  # position of the first skipped token in the stream of training tokens
    skip_to: int  # position of the first token after the skipped part
    lr: float = 1.0  # factor on the lr right after the rewind
    lr_tokens: int = 0  # number of tokens over which this factor rises to 1
    attempt: int = 0  # number of rewinds for the same anomaly, including this rewind; 0 for a manual rewind
    found_step: int = 0  # step at which the anomaly was found; 0 for a manual rewind
    asked: Mapping[str, int] | None = None  # arguments of a manual rewind; None for an automatic one

    @property
    def skipped(self) -> int:
        return self.skip_to - self.skip_from

    def document(self) -> dict[str, Any]:
        """Return the rewind as a JSON object, for an event or a checkpoint."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Rewind":
        """Return the rewind of an event or checkpoint. Damaged data raises KeyError, TypeError or ValueError."""
        counts = {field.name: document[field.name] for field in fields(cls) if field.name != "asked"}
        made = cls(**counts, asked=document.get("asked"))
        del counts["lr"]
        wrong = any(type(count) is not int for count in counts.values()) or not isinstance(made.asked, dict | None)
        if wrong or not math.isfinite(made.lr):
            raise ValueError("a value of a rewind has a wrong type")
        return made


def rewinds_of(run: RunFolder) -> tuple[Rewind, ...]:
    """Return all rewinds of a run, in order: the longer of the lists in the newest checkpoint and in events.jsonl.
    Raise InputError if the event of a rewind is damaged."""
    rewinds: list[Rewind] = []
    with suppress(*WRONG_TYPES):  # a damaged checkpoint is reported when it is loaded
        rewinds = [Rewind.of(each) for each in newest_document(run)["rewinds"]]
    for event in run.events():
        if event["event"] not in RETURNS:
            continue
        try:
            whole = [*map(Rewind.of, event["earlier_rewinds"]), Rewind.of(event)]
        except WRONG_TYPES:
            raise InputError(f"{run.events_file}: a {event['event']} event is damaged; {DAMAGED_EVENTS}") from None
        if len(whole) > len(rewinds):
            rewinds = whole
    return tuple(rewinds)


def seconds_spent(run: RunFolder) -> float:
    """Return the training time that the files of a run record, also that of steps which rewinds have undone."""
    returns = [event.get("seconds") for event in run.events() if event["event"] in RETURNS]
    known = [newest_document(run).get("seconds"), *returns]
    return max((float(each) for each in known if isinstance(each, int | float) and math.isfinite(each)), default=0.0)


def _skipping(rewinds: Sequence[Rewind]) -> list[Rewind]:
    """Return the rewinds whose data are still skipped. A manual rewind cancels the skips of earlier manual rewinds
    with the same or a later target, but not those of the spike guard."""
    left: list[Rewind] = []
    for rewind in rewinds:
        if (rewind.asked or {}).get(_TAKES_BACK):
            left = [each for each in left if not each.asked or each.to_tokens < rewind.to_tokens]
        left.append(rewind)
    return left


def skipped(rewinds: Sequence[Rewind]) -> tuple[tuple[int, int], ...]:
    """Return the skipped intervals of the token stream as (start, end), sorted and without overlap."""
    stretches: list[tuple[int, int]] = []
    for start, end in sorted((rewind.skip_from, rewind.skip_to) for rewind in _skipping(rewinds)):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        elif start < end:
            stretches.append((start, end))
    return tuple(stretches)


def position(rewinds: Sequence[Rewind], tokens: int) -> int:
    """Return the position in the token stream after ``tokens`` trained tokens. Skipped tokens count, too. If
    tokens 50 to 59 were skipped, the position after 80 trained tokens is 90."""
    for start, end in skipped(rewinds):
        if tokens >= start:
            tokens += end - start
    return tokens


def lr_factor(rewinds: Sequence[Rewind], tokens: int) -> float:
    """Return the factor by which the rewinds lower the schedule's lr after ``tokens`` trained tokens."""
    factor = 1.0
    for rewind in rewinds:
        since = tokens - rewind.to_tokens
        if 0 < since < rewind.lr_tokens:
            factor *= rewind.lr + (1 - rewind.lr) * since / rewind.lr_tokens
    return factor


def undone(tokens: int, later: Sequence[Rewind]) -> bool:
    """Return whether one of the ``later`` rewinds has undone a state that was saved at ``tokens``. A rewind to 80
    tokens undoes a state at 100, but not one at 80."""
    return any(rewind.to_tokens < tokens for rewind in later)


def text_left_out(run: RunFolder) -> str | None:
    """Return a phrase that counts the tokens that manual rewinds of a run have skipped. Return None if no tokens were
    skipped, or if the list of rewinds is damaged."""
    with suppress(InputError):
        manual = [rewind for rewind in _skipping(rewinds_of(run)) if rewind.asked and rewind.skipped > 0]
        if manual:
            count = sum(rewind.skipped for rewind in manual)
            return f"{format_quantity(count)} tokens of its text after {format_quantity(manual[0].to_tokens)} tokens"
    return None


def _values_used(events: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, Any]]]:
    """Return {path in the recipe: [(tokens from which a value was used, value), ...]} for paths that rewinds changed,
    without values used only in steps that a later rewind has undone."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in events:
        if event["event"] not in RETURNS:
            continue
        with suppress(*WRONG_TYPES):  # damage is reported when the rewinds are read
            to_tokens = int(event["to_tokens"])
            changes = {change["path"]: change for change in event.get("changes", ())}
            for path in {**found, **changes}:
                values = found.get(path) or [(0, changes[path]["before"])]
                now = changes[path]["after"] if path in changes else values[-1][1]
                found[path] = [each for each in values if each[0] < to_tokens]
                if not found[path] or found[path][-1][1] != now:
                    found[path].append((to_tokens, now))
    return found


def changed_values(run: RunFolder) -> list[str]:
    """Return a phrase for each value of the recipe that ``--rewind-to`` changed in the middle of the run, such as
    "hyperparameters.lr 0.01 up to 5.12 k tokens and then 0.02". Values that do not affect the weights are left out.
    """
    return [
        f"{path} "
        + " and then ".join(
            f"{value} up to {format_quantity(after[0])} tokens" if after else f"{value}"
            for (_, value), after in zip(values, [*values[1:], None], strict=True)
        )
        for path, values in _values_used(run.read_events()).items()
        if len(values) > 1 and not path.startswith(("evaluation.", "stability."))
    ]


def _with_reasons(recipe: Recipe, why: Mapping[str, str], used: Mapping[str, list[tuple[int, Any]]]) -> Recipe:
    """Return ``recipe`` with the run's reasons ``why``, and a reason for each value that changed during the run, by
    ``used`` (:func:`_values_used`). Reasons of changes that later rewinds have undone are left out."""
    own = (item for reasons in (why, recipe.why) for item in reasons.items())
    kept = {path: reason for path, reason in own if not (reason.startswith("since ") and BY_REWIND in reason)}
    changed = {
        path: f"since {values[-1][0]:,} tokens, {BY_REWIND}; before: {brief(values[-2][1])}"
        for path, values in used.items()
        if len(values) > 1
    }
    return recipe.replace({"why": kept | changed})


@dataclass(frozen=True)
class ManualRewind:
    """A user's request that a run continues from an earlier checkpoint."""

    rewind_to: int  # trained tokens: use the newest undamaged checkpoint at or before this count
    skip_tokens: int = 0  # tokens of data to skip after the checkpoint, rounded up to whole sequences

    def __post_init__(self) -> None:
        if any(type(count) is not int or count < 0 for count in (self.rewind_to, self.skip_tokens)):
            raise InputError(f"{self}: give whole numbers of tokens, not below 0")

    def done(self, run: RunFolder, recipe: Recipe) -> bool:
        """Return whether this rewind equals the run's last manual rewind, and ``recipe`` differs from the run's
        recipe at most in layout and micro-batch."""
        asked = [rewind.asked for rewind in rewinds_of(run) if rewind.asked]
        same = bool(asked) and asked[-1].items() >= asdict(self).items()
        return same and not changes_of(run.recipe(), recipe)

    def check(self, run: RunFolder, recipe: Recipe) -> None:
        """Raise InputError if there is no suitable checkpoint, if files belong to different runs, or if ``recipe``
        changes a value that must stay the same during a run."""
        if not run.recipe_file.exists():
            raise InputError(f"--rewind-to: there is no run in {run.path}; give the folder of a run with --run")
        refused = [change for change in changes_of(run.recipe(), recipe) if not changeable(change[0])]
        if refused:
            raise InputError(
                f"--rewind-to: {describe_changes(refused)}; a rewind can change only the sections "
                f"[{'], ['.join(SECTIONS)}] and the values {', '.join(HYPERPARAMETERS)}; for other changes, give a "
                "new folder with --run"
            )
        require_run_of(run, run.recipe())
        run.require_own_checkpoints(rewinds=True)
        self._target(run)

    def go(self, run: RunFolder, recipe: Recipe) -> None:
        """Record this rewind in the run folder, and store ``recipe`` there if it differs, unless this is done."""
        with LockedFolder(run.path, "run folder"):
            if self.done(run, recipe):
                return
            changes = changes_of(run.recipe(), recipe)
            to_tokens, rewinds = self._target(run), rewinds_of(run)
            asked = asdict(self) | {_TAKES_BACK: True}
            left = _skipping((*rewinds, Rewind(to_tokens, 0, 0, asked=asked)))[:-1]
            start, seq_len = position(left, to_tokens), recipe.model.seq_len
            end = start + -(-self.skip_tokens // seq_len) * seq_len
            for first, last in skipped(left):  # these do not count again
                if start <= first < end:
                    end += last - first
            rewind = Rewind(to_tokens, start, end, asked=asked)
            metrics, lines = run.metrics(), RunLines(run)
            at = {key: metrics[-1].get(key, 0) if metrics else 0 for key in ("step", "tokens")}
            at["seconds"] = seconds_spent(run)
            before, changed = run.recipe(), recorded_changes(changes, recipe)
            used = _values_used([*run.read_events(), {"event": "rewind", "to_tokens": to_tokens} | changed])
            recipe = _with_reasons(recipe if changes else before, before.why, used)
            saves = bool(changes) or recipe.why != before.why  # a rewind without changes may undo earlier ones
            changed = recorded_changes(changes, recipe) if saves else {"changes": []}
            earlier = [each.document() for each in rewinds]
            lines.event("rewind", **at, **rewind.document(), earlier_rewinds=earlier, **changed)
            lines.require_written()
            if saves:
                run.save_recipe(recipe, also_in_events=True)

    def _target(self, run: RunFolder) -> int:
        """Return the token count of the checkpoint to which the run returns, or raise InputError."""
        from leaven.training.checkpoint import read_checkpoint  # imports this module, and torch

        to_here = Rewind(self.rewind_to, 0, 0)
        found, damaged = read_checkpoint(run.checkpoints, (*rewinds_of(run), to_here), recipe=run.recipe())
        if found is None:
            counts = ", ".join(str(tokens_of(path)) for path in checkpoints(run.checkpoints))
            none = "there are no checkpoints, so leave out --rewind-to"
            there = f"there are checkpoints at {counts} tokens" if counts else none
            asked = self.rewind_to
            raise InputError(f"--rewind-to {asked}: no undamaged checkpoint at or before {asked} tokens; {there}")
        require_own_files(run, found.state)
        tokens = found.progress.tokens
        if tokens != self.rewind_to and self.rewind_to in {*map(tokens_of, damaged), *saved_checkpoints(run)}:
            missing = run.checkpoints / checkpoint_name(self.rewind_to)
            raise InputError(
                f"--rewind-to {self.rewind_to}: {missing} is damaged or gone; "
                f"bring it back (is its disk mounted?), or type --rewind-to {tokens} for the checkpoint before it"
            )
        return tokens
