"""One trial: a recipe trained from the start to its end, or to where that is in sight, and what it came to.

A trial that takes longer than a minute keeps a checkpoint, from which another process goes on bit for bit.

Durations are compared on one trunk: up to where the first of them cools down, wsd runs of different durations are
the same run (Hägele et al. 2024, arXiv 2405.18392). There the state is copied, the cooldown is trained and judged,
and the trunk goes on from the copy, so that k durations cost the longest one and k - 1 cooldowns.
"""

import json
import math
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from leaven.data.tokens import TokenSet, prepare
from leaven.planning.flops import flops_per_token
from leaven.recipe.errors import InputError
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import resolve
from leaven.training.checkpoint import NotSaved, checkpoints, read_checkpoint, write_checkpoint
from leaven.training.course import Course
from leaven.training.engine import Diverged, Training
from leaven.training.outcome import Curve, Outcome, Rival, curve_of
from leaven.training.rival import comparable, expected, hopeless_against


def train_trial(
    recipe: Recipe,
    *,
    rival: Rival | None = None,
    checkpoint: Path | None = None,
    durations: Sequence[int] = (),
    checkpoint_seconds: float = 60,
) -> Outcome:
    """Train a recipe, or as far as it takes to see that it diverges or is out of reach of the ``rival``.

    Args:
        rival: a run of another recipe, of this one's duration and schedule, to be measured against.
        checkpoint: a folder of this trial's own, written to every ``checkpoint_seconds``, and to be removed once the
            outcome is kept. What is there of the same recipe, text and durations is gone on from.
        durations: in tokens; all are trained, as a trunk to the longest of them with branches.

    Raises:
        InputError: if the recipe cannot be trained, or the durations have no trunk in common.
    """
    tokens = prepare(recipe.data, recipe.model.vocab_size)
    *branches, trunk = branches_of(recipe, durations, tokens) or [recipe]
    trial = _Trial(Training(trunk, tokens), branches, bool(durations))
    if rival is not None and not comparable(rival, trunk.data.tokens):
        rival = None
    kept = None
    if checkpoint is not None:
        kept = _Kept(checkpoint / _key([trunk, *branches], tokens), checkpoint_seconds)
        kept.take_up(trial)
    try:
        loss, stopped = trial.train(rival, kept), False
    except Diverged:
        loss, stopped = math.inf, False
    except _OutOfReach:
        assert rival is not None
        loss, stopped = expected(trial.course.curve, rival), True
    return trial.outcome(loss, stopped)


def branches_of(recipe: Recipe, durations: Sequence[int], tokens: TokenSet) -> list[Recipe]:
    """The recipe at each of the durations, in tokens, the shortest first.

    Raises:
        InputError: if they are not all branches of the longest.
    """
    schedule, batches, found = recipe.schedule, recipe.batches, list[Recipe]()
    if durations and schedule.decay != "wsd":
        raise InputError(f"durations: a {schedule.decay} run holds no shorter one; set schedule.decay = wsd")
    for duration in sorted(set(durations)):
        told = f"durations: {duration:,} tokens"
        if duration <= schedule.warmup_tokens:
            raise InputError(f"{told} do not go beyond the warm-up of {schedule.warmup_tokens:,}; give longer ones")
        steps = batches.first_step_at(duration)
        if (end := batches.tokens_at_step(steps)) != duration:
            before = batches.tokens_at_step(steps - 1)
            raise InputError(f"{told} are no whole number of batches; {before:,} or {end:,} are")
        if max(tokens.epochs(duration).values()) > 1:
            raise InputError(
                f"{told} go through the text more than once, and what is repeated is worth less; there are "
                f"{len(tokens.train):,} tokens: give shorter durations or more text"
            )
        found.append(recipe.replace({"data.tokens": duration}))
    if len({_values(branch) for branch in found}) > 1:
        raise InputError(
            f"durations: rule {recipe.scaling.rule} gives each its own values, so they have no common trunk; "
            "take scaling.base out, or train each by itself"
        )
    return found


def _values(recipe: Recipe) -> tuple[Any, ...]:
    """What the rule makes of a recipe."""
    table = resolve(recipe)
    return table.rows, table.attention_scale, table.beta2


def cooldown_start(recipe: Recipe) -> float:
    """The tokens up to which a wsd run is its trunk: its lr falls with the step that ends beyond them."""
    duration, schedule = recipe.data.tokens, recipe.schedule
    return duration - min(schedule.decay_ratio * duration, duration - schedule.warmup_tokens)


class _OutOfReach(Exception):
    """Of the rival."""


class _Trial:
    """A trial on its way. ``branches`` are those still to come, ``ended`` what the others came to, ``cooled`` their
    tokens."""

    def __init__(self, training: Training, branches: Sequence[Recipe], compares: bool) -> None:
        self.training, self.branches = training, list(branches)
        self.course = Course(training.recipe.model.vocab_size, training.recipe.data.tokens)
        self.ended: Curve = ()
        self.cooled = 0
        self._compares = compares

    def train(self, rival: Rival | None, kept: "_Kept | None") -> float:
        """To the end: the validation loss.

        Raises:
            Diverged, _OutOfReach
        """
        training, warmup = self.training, self.training.recipe.schedule.warmup_tokens
        while not training.finished:
            while self.branches and self._next_end() > cooldown_start(self.branches[0]):
                self._cool_down(self.branches.pop(0))
            before = self.course.curve
            self._step(self.course)
            looked_at = self.course.curve is not before and self.course.done > warmup
            if rival is not None and looked_at and hopeless_against(self.course.curve, rival):
                raise _OutOfReach
            if kept is not None and not training.finished:
                kept.save_if_due(self)
        loss = training.evaluate()
        if self._compares and math.isfinite(loss):
            self.ended = (*self.ended, (training.progress.tokens, loss))
        return loss

    def _next_end(self) -> int:
        """The tokens trained once the next step is done."""
        tokens = self.training.progress.tokens
        return tokens + self.training.recipe.batches.batch_at(tokens)

    def _step(self, course: Course) -> None:
        step = self.training.step()
        if course.lost(step.loss, step.batch_tokens):
            raise Diverged(f"mean loss {course.mean:g} at step {step.step}")

    def _cool_down(self, branch: Recipe) -> None:
        """Train a branch to its end and come back; one that diverges has no loss."""
        training, trunk = self.training, self.training.recipe
        course = replace(self.course, tokens=branch.data.tokens)  # it is judged as a run of its own length
        here = training.checkpoint().copied()
        training.recipe = branch
        with suppress(Diverged):
            while not training.finished:
                self._step(course)
            loss = training.evaluate()
            if math.isfinite(loss):
                self.ended = (*self.ended, (branch.data.tokens, loss))
        self.cooled += training.progress.tokens - here.progress.tokens
        seconds = training.progress.seconds
        training.recipe = trunk
        training.restore(here)
        training.progress = replace(here.progress, seconds=seconds)

    def state(self) -> dict[str, Any]:
        """What is no tensor, for JSON."""
        return {"course": asdict(self.course), "ended": self.ended, "cooled": self.cooled, "left": len(self.branches)}

    def load(self, state: dict[str, Any]) -> None:
        self.course = self.course.taken_up(state["course"])
        self.ended = curve_of(state["ended"])
        self.cooled, self.branches = state["cooled"], self.branches[len(self.branches) - state["left"] :]

    def outcome(self, loss: float, stopped: bool) -> Outcome:
        trained = self.training.progress.tokens + self.cooled
        return Outcome(
            loss=loss if math.isfinite(loss) else math.inf,
            tokens=trained,
            flops=trained * flops_per_token(self.training.recipe.model),
            seconds=self.training.progress.seconds,
            curve=self.course.curve,
            stopped=stopped,
            branches=self.ended,
            worker=f"{socket.gethostname()}:{os.getpid()}",
        )


class _Kept:
    """The checkpoint of a trial, in a folder whose name says of what: another trial's is not looked at."""

    def __init__(self, folder: Path, every_seconds: float) -> None:
        self._folder, self._every, self._last = folder, every_seconds, time.monotonic()

    def take_up(self, trial: _Trial) -> None:
        found, _ = read_checkpoint(self._folder)
        if found is not None:
            trial.training.restore(found)
            trial.load(dict(found.state))

    def save_if_due(self, trial: _Trial) -> None:
        """A disk that is full costs the checkpoint and not the trial."""
        if time.monotonic() - self._last < self._every:
            return
        with suppress(NotSaved):
            kept = write_checkpoint(self._folder, replace(trial.training.checkpoint(), state=trial.state()))
            for other in checkpoints(self._folder):
                if other != kept:
                    shutil.rmtree(other, ignore_errors=True)
        self._last = time.monotonic()


def _key(recipes: Sequence[Recipe], tokens: TokenSet) -> str:
    """The same for trials that compute the same."""
    told = [recipe.model_dump(mode="json", exclude={"name", "why"}) for recipe in recipes]
    return blake2b(json.dumps([told, tokens.fingerprint], sort_keys=True).encode(), digest_size=12).hexdigest()
