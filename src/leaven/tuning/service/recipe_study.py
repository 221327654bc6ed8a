"""A study whose trials train a recipe, in worker processes of leaven."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leaven.data.tokens import TokenSet
from leaven.errors import InputError, out_of_memory
from leaven.interop.weights import tensors_fingerprint, weights_fingerprint
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe
from leaven.training.device import default_device
from leaven.training.engine import check_trainable
from leaven.training.outcome import Outcome
from leaven.training.run_folder import RunFolder
from leaven.training.stack import MOST, most_trials, refusal, train_stack
from leaven.training.trial import WorkerPool, branches_of, cooldown_start, fingerprint_of, train_trial
from leaven.tuning.earlier_study import earlier_trials
from leaven.tuning.point import BATCH, COOLDOWN, DECAY, DROPOUT, OPTIMIZER, TOKENS, WARM_UP
from leaven.tuning.service.search_loop import Objectives, Proposal, TrialReleased, WorkerDied
from leaven.tuning.service.search_plan import LEAST_ROUNDS, Budget, check_search, known_trials
from leaven.tuning.service.study import BaseStudy
from leaven.tuning.service.study_folder import CHECKPOINTS, attempts
from leaven.tuning.space import Space

CHECKPOINT_SECONDS = 60.0  # between checkpoints of a trial
STOP_POLL = 0.25  # seconds between checks of whether to stop
# A stack is several trials trained as one batched model. Up to so many FLOPs a step of a trial, it was measured to be
# faster on a GPU than single trials: width 256, 4 blocks, 1,280 tokens a step (docs/log.md).
STACKED_FLOPS = 2.8e10


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
    """Check the arguments of :class:`Study` and :meth:`Study.run` that do not depend on the tokenized text.

    Raises:
        InputError: if the method is unknown, or cannot use the space's prior knowledge; if the name of the recipe is
            invalid; if the study ``from_study`` cannot be used; or if the budget is missing, or is too small for one
            trial or the coarsest grid.
    """
    space = _narrowed(space, method, durations)
    one = _flops_of_trial(recipe, durations)
    known_trials(space.axes, method, Budget(trials, flops, hours, one), noise)
    if flops is not None and flops < one:
        raise InputError(
            f"--flops {flops:g} is too small, because one trial takes {one:.3g} FLOPs; give {1.01 * one:.3g} or more"
        )
    if from_study is not None:
        space = replace(space, earlier=earlier_trials(from_study, space)[0])
    check_search(method, space.axes, recipe.name)


def _flops_of_trial(recipe: Recipe, durations: Sequence[int]) -> float:
    """Return the FLOPs of one trial: the longest run, plus the cooldowns of the shorter runs."""
    *shorter, longest = sorted(set(durations)) or [recipe.data.tokens]
    cooldowns = sum(tokens - cooldown_start(recipe.schedule, tokens) for tokens in shorter)
    return flops_per_token(recipe.model) * (longest + cooldowns)


def _narrowed(space: Space, method: str, durations: Sequence[int]) -> Space:
    """Return ``space`` without the values and parts of ranges that ``method`` and ``durations`` rule out."""
    if durations:
        space = space.without(BATCH, "each of the --durations must be a whole number of batches")
        space = space.without(TOKENS, "--durations sets the run lengths").without(DECAY, "--durations needs wsd")
        space = space.below(WARM_UP, min(durations))
    return space.within_near() if method == "grid" else space


def why_not_stacked(space: Space, durations: Sequence[int]) -> str | None:
    """Return why the trials of a study cannot be trained as a stack (one batched model), or None if they can."""
    if durations:
        return "a stack trains one duration"
    if varied := [path for path in (BATCH, TOKENS, DROPOUT, OPTIMIZER) if path in space.paths]:
        return f"the search varies {varied[0]}"
    setting = refusal(space.recipe)
    return setting and f"a stack cannot train {setting}"


def stackable(space: Space) -> tuple[Space, str | None]:
    """Return (``space`` without batch size, duration and dropout, which stacked trials share, None), or (``space``,
    the reason why trials cannot be stacked)."""
    narrowed = space
    for path, need in ((BATCH, "the same batch size"), (TOKENS, "the same duration"), (DROPOUT, "no dropout")):
        narrowed = narrowed.without(path, f"stacked trials must have {need}")
    why = "mps has no float64" if default_device().type == "mps" else why_not_stacked(narrowed, ())
    return (space if why else narrowed), why


def stack_size(
    space: Space, durations: Sequence[int], trials: int | None, gpus: int, free: Callable[[], float]
) -> tuple[int, str]:
    """Return (number of trials that each of ``gpus`` GPUs trains at once, the reason as text). The number is above 1
    only if this was measured to be faster. ``trials`` may be unknown. ``free`` returns the free bytes of a GPU."""
    recipe, why = space.recipe, why_not_stacked(space, durations)
    if why is None and flops_per_token(recipe.model) * recipe.batch.tokens > STACKED_FLOPS:
        why = f"several trials at once are known to be faster only up to {STACKED_FLOPS:.2g} FLOPs a step"
    if why is not None or trials is None:
        return 1, why or "the number of trials is unknown; give --trials, or --stack"
    if (share := trials // (LEAST_ROUNDS * gpus)) < 2:
        return 1, f"{trials} trials are too few to train several at once"
    if (fitting := most_trials(recipe, free())) < 2:
        return 1, "two trials do not fit into half of the free memory"
    if fitting < share:
        limit = "was measured" if fitting == MOST else "fits into half of the free memory"
        return fitting, f"the largest stack that {limit}"
    return share, f"a stack with 1/{LEAST_ROUNDS * gpus} of all trials"


@dataclass
class TrialTrainer:
    """The objective of a :class:`Study`. Trains the recipe with proposed values, in one process per worker."""

    space: Space
    tokens: TokenSet
    durations: Sequence[int]  # run lengths in tokens; empty: only that of the recipe
    folder: Path  # of the checkpoints
    devices: Sequence[str | None]  # the GPU of each worker, as in ``CUDA_VISIBLE_DEVICES``; None: all GPUs
    stop: Callable[[], bool]  # returns whether to stop; running trials then run again later
    note: Callable[[str], None]  # shows a line to the user
    inputs: str  # the expected fingerprint of the text and the start weights
    # Number of trials that a worker trains at once. If it is above 1, no trial is pruned, because the other trials of
    # the stack would not become faster.
    stack: int

    def __post_init__(self) -> None:
        self._leaving, self._held = threading.Event(), ExitStack()

    def __enter__(self) -> "TrialTrainer":
        # If one process of a pool dies, the whole pool is unusable. So each worker has its own pool.
        self._pools = [self._held.enter_context(WorkerPool(1, device)) for device in self.devices]
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.set()
        self._held.close()

    def __call__(self, proposals: Sequence[Proposal]) -> list[Outcome]:
        """Train the proposals of a worker and return their outcomes. Invalid values get an infinite loss.

        Raises:
            InputError: if stacked trials (trained as one batched model) do not fit into memory, or if the training
                text or the start weights have changed.
            TrialReleased: if the search is stopped during the training.
            WorkerDied: if the worker process died.
        """
        recipes: dict[int, Recipe] = {}  # the valid recipes, by index of the proposal
        for k, proposal in enumerate(proposals):
            # ValueError: lr x weight_decay is above 1, or the warm-up is longer than the shortest duration. Such a
            # recipe is not trained and counts as diverged.
            with suppress(ValueError):
                recipe = self.space.recipe_at(proposal, self.space.seed + proposal.seed)
                branches_of(recipe, self.durations, self.tokens)
                recipes[k] = recipe
        trained = self._train(proposals[0], list(recipes.values())) if recipes else []
        found = dict(zip(recipes, trained, strict=True))
        return [found.get(k, Outcome(math.inf)) for k in range(len(proposals))]

    def _train(self, first: Proposal, recipes: list[Recipe]) -> list[Outcome]:
        pool = self._pools[first.worker]
        saving: dict[str, Any] = {
            "checkpoint": self._checkpoint(first),
            "checkpoint_seconds": CHECKPOINT_SECONDS,
            "inputs": self.inputs,
        }
        future: Future[Any]
        if self.stack > 1:
            future = pool.submit(train_stack, recipes, self.stack, **saving)
        else:
            # Trials with different cooldowns have loss curves of different shapes, so their curves are not compared.
            baseline = None if COOLDOWN in self.space.paths else first.baseline
            future = pool.submit(train_trial, *recipes, baseline=baseline, durations=self.durations, **saving)
        while not wait([future], timeout=STOP_POLL).done:
            if self.stop() or self._leaving.is_set():
                raise TrialReleased
        try:
            found: Outcome | list[Outcome] = future.result()
        except BrokenProcessPool:
            if self.stop() or self._leaving.is_set():  # killed together with this process
                raise TrialReleased from None
            raise WorkerDied("has lost its worker process; possible cause: out of memory") from None
        except Exception as error:
            if self.stack == 1 or not out_of_memory(error):
                raise
            raise InputError(
                f"{self.stack} trials at once need more memory than is free; give a --stack below {self.stack}"
            ) from None
        return found if isinstance(found, list) else [found]

    def _checkpoint(self, proposal: Proposal) -> Path:
        """Return the checkpoint folder of this attempt: the renamed folder of the last attempt, or a new one. A new
        name, because a killed worker of the last attempt may still write for half a second."""
        folder = self.folder / f"{proposal.origin:06d}-{proposal.number:06d}"
        with suppress(OSError):  # another attempt has moved it
            for last in [path for origin, path in attempts(self.folder) if origin == proposal.origin][-1:]:
                last.rename(folder)
                return folder
        if proposal.number != proposal.origin and self.stack == 1:  # of a stack, only one trial has a folder
            self.note(
                f"trial {proposal.number} begins again, because {self.folder} has no folder of an earlier attempt; "
                "possible causes: that attempt failed, the folder was removed, or the disk is not mounted"
            )
        with suppress(OSError):  # a line says so when the first checkpoint cannot be saved
            folder.mkdir(parents=True, exist_ok=True)  # a later attempt knows by it that nothing was removed
        return folder


class Study(BaseStudy):
    """A study whose trials train ``recipe``. See :class:`BaseStudy` for the other arguments.

    Args:
        space: the searched values of ``recipe``.
        tokens: the prepared data of ``recipe``.
        durations: run lengths in tokens. Each trial trains one run of each length. The loss of the longest run is
            the loss of the trial. By default, each trial is one run of ``data.tokens`` tokens.
        stack: number of trials that a worker trains at once as one batched model (``training/stack.py``).

    Raises:
        InputError: see :class:`BaseStudy`. Also if a duration cannot be trained on the tokens, if no value is left
            to search, or if ``data.tokens`` is searched although no text is repeated (more is always better then).
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
        stack: int = 1,
    ) -> None:
        self.stack = stack
        check_trainable(recipe, tokens)
        branches_of(recipe, durations, tokens)  # raises if a duration cannot be trained
        space = _narrowed(space, method, durations)
        if TOKENS in space.paths and max(tokens.epochs(recipe.data.tokens).values()) <= 1:
            raise InputError(
                f"--space {TOKENS}: no text is repeated, so more tokens are always better and need no search; "
                f"leave {TOKENS} out, or compare run lengths with --durations"
            )
        self._tokens, self._durations = tokens, tuple(durations)
        self._fingerprint = fingerprint_of(recipe, tokens)
        shared: dict[str, Any] = {"text": tokens.fingerprint, "durations": list(durations)}
        if recipe.start.folder is not None:
            shared["weights"] = weights_fingerprint(recipe.start.folder)
            shared["tensors"] = tensors_fingerprint(recipe.start.folder)
        super().__init__(
            out,
            space,
            method,
            store,
            noise=noise,
            from_study=from_study,
            shared=shared,
            run_flops=_flops_of_trial(recipe, durations),
            about={"durations": tuple(durations)},
        )

    def _claim_folder(self) -> None:
        super()._claim_folder()
        RunFolder(self.out).claim_checkpoints()

    def _trainer(self, devices: Sequence[str | None]) -> AbstractContextManager[Objectives]:
        if self.space.recipe.average is not None:
            self._note(
                "caution: trials are compared by the loss of their weights, not of the averaged weights ([average]); "
                "other values may be best for averaged weights"
            )
        return TrialTrainer(
            self.space,
            self._tokens,
            self._durations,
            self.out / CHECKPOINTS,
            devices,
            self._stop,
            self._note,
            self._fingerprint,
            self.stack,
        )
