"""A study over training runs of a recipe: the objective that trains a trial in a worker process, and the study."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe
from leaven.training.engine import check_trainable
from leaven.training.outcome import Outcome
from leaven.training.trial import WorkerPool, branches_of, cooldown_start, train_trial
from leaven.tuning.earlier_study import earlier_trials
from leaven.tuning.point import BATCH, COOLDOWN, DECAY, TOKENS, WARM_UP, recipe_at
from leaven.tuning.service.search_loop import Objective, Proposal, TrialReleased, WorkerDied
from leaven.tuning.service.search_plan import Budget, check_search, known_runs
from leaven.tuning.service.study import CHECKPOINTS, BaseStudy
from leaven.tuning.space import Space

POLL = 0.25  # seconds between looks at whether to stop


def check_request(
    recipe: Recipe,
    space: Space,
    method: str,
    *,
    durations: Sequence[int],
    trials: int | None,
    flops: float | None,
    hours: float | None,
    noise: float | None,
    from_study: Path | None,
) -> None:
    """Check what needs no tokens: the method, the budget of a study, and the earlier study that it uses.

    The arguments are those of :class:`Study` and :meth:`Study.run`.

    Raises:
        InputError: if the method is unknown, if there is no budget, if one trial or the smallest grid does not fit
            into the budget, or if the earlier study cannot be used.
    """
    space = _narrowed(space, method, durations)
    one = flops_per_token(recipe.model) * max(durations, default=recipe.data.tokens)
    known_runs(space.axes, method, Budget(trials, flops, hours, one), noise)
    if flops is not None and flops < one:
        raise InputError(
            f"--flops {flops:g} is too small, because one trial takes {one:.3g} FLOPs; give at least this number"
        )
    if from_study is not None:
        space = replace(space, earlier=earlier_trials(from_study, space)[0])
    check_search(method, space.axes, recipe.name)


def _narrowed(space: Space, method: str, durations: Sequence[int]) -> Space:
    """Return the space without the values that a study with these ``durations`` or this method cannot search."""
    if durations:
        space = space.without(BATCH, "each of the --durations must be a whole number of batches")
        space = space.without(TOKENS, "--durations sets the run lengths").without(DECAY, "--durations needs wsd")
        space = space.below(WARM_UP, min(durations))
    return space.within_near() if method == "grid" else space


class TrialTrainer:
    """The objective of a study: trains the recipe with the values of a proposal in a worker process.

    As a context manager it starts a process with one thread for each worker, and ends them at the end.

    Args:
        folder: the folder of checkpoints.
        devices: the GPU of each worker, as in ``CUDA_VISIBLE_DEVICES``; None if a worker may use all.
        stop: a function that returns true when the trials are to be released.
        checkpoint_seconds: seconds between checkpoints of a trial.
    """

    def __init__(  # noqa: PLR0917 - one of each
        self,
        space: Space,
        tokens: TokenSet,
        durations: Sequence[int],
        folder: Path,
        devices: Sequence[str | None],
        stop: Callable[[], bool],
        checkpoint_seconds: float,
    ) -> None:
        self._recipe, self._tokens, self._durations, self._folder = space.recipe, tokens, durations, folder
        # Loss curves with other cooldowns cannot be compared.
        self._prunes = COOLDOWN not in space.paths
        self._devices, self._stop, self._checkpoint_seconds = devices, stop, checkpoint_seconds
        self._leaving, self._held = threading.Event(), ExitStack()

    def __enter__(self) -> "TrialTrainer":
        # A pool breaks as a whole when a process dies, so each worker has its own pool.
        self._pools = [self._held.enter_context(WorkerPool(1, device)) for device in self._devices]
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.set()
        self._held.close()

    def __call__(self, proposal: Proposal) -> Outcome:
        """Train a proposal and return the outcome.

        Raises:
            TrialReleased: if the search is stopped during the training.
            WorkerDied: if the process died.
        """
        try:
            recipe = recipe_at(self._recipe, proposal, self._recipe.data.seed + proposal.seed)
            branches_of(recipe, self._durations, self._tokens)
        except ValueError:  # an invalid recipe: lr x weight_decay above 1, or a warm-up beyond the shortest duration
            return Outcome(math.inf)
        future = self._pools[proposal.worker].submit(
            train_trial,
            recipe,
            baseline=proposal.baseline if self._prunes else None,
            checkpoint=self._checkpoint(proposal),
            durations=self._durations,
            checkpoint_seconds=self._checkpoint_seconds,
        )
        while not wait([future], timeout=POLL).done:
            if self._stop() or self._leaving.is_set():
                raise TrialReleased
        try:
            return future.result()
        except BrokenProcessPool:
            raise WorkerDied from None

    def _checkpoint(self, proposal: Proposal) -> Path:
        """Return the checkpoint folder for this attempt at a run. The checkpoint of an earlier attempt, if any, is
        moved to this folder.

        Each attempt has a separate folder, because the worker of the earlier attempt may go on writing for half a
        second after its command was killed.
        """
        folder = self._folder / f"{proposal.origin:06d}-{proposal.number:06d}"
        for last in sorted(self._folder.glob(f"{proposal.origin:06d}-*"))[-1:]:
            with suppress(OSError):  # another attempt has moved it, or it is gone: train from the start
                last.rename(folder)
        return folder


class Study(BaseStudy):
    """A study over training runs of a recipe. See :class:`BaseStudy` for the other arguments.

    Args:
        durations: run lengths in tokens. Each trial trains and compares all of them, and its loss is that of the
            longest.

    Raises:
        InputError: if the recipe cannot be trained on the tokens; see also :class:`BaseStudy`.
    """

    space: Space

    def __init__(  # noqa: PLR0917 - the first ones are natural by position
        self,
        out: Path,
        recipe: Recipe,
        space: Space,
        method: str,
        tokens: TokenSet,
        store: str | None = None,
        *,
        durations: Sequence[int] = (),
        noise: float | None = None,
        from_study: Path | None = None,
    ) -> None:
        check_trainable(recipe, tokens)
        *branches, longest = branches_of(recipe, durations, tokens) or [recipe]
        cooldowns = sum(branch.data.tokens - cooldown_start(branch) for branch in branches)
        space = _narrowed(space, method, durations)
        if TOKENS in space.paths and max(tokens.epochs(recipe.data.tokens).values()) <= 1:
            raise InputError(
                f"--space {TOKENS}: no text is repeated, so more tokens are always better and cost more; leave this "
                "value out, or compare run lengths with --durations"
            )
        self._tokens, self._durations = tokens, tuple(durations)
        super().__init__(
            out,
            space,
            method,
            store,
            noise=noise,
            from_study=from_study,
            shared={"text": tokens.fingerprint, "durations": list(durations)},
            run_flops=flops_per_token(recipe.model) * (longest.data.tokens + cooldowns),
            about={"durations": tuple(durations)},
        )

    def _trainer(self, devices: Sequence[str | None], checkpoint_seconds: float) -> AbstractContextManager[Objective]:
        folder = self.out / CHECKPOINTS
        return TrialTrainer(
            self.space, self._tokens, self._durations, folder, devices, self._stop, checkpoint_seconds
        )
