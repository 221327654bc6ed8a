"""A study: a search over short trainings of a recipe, or over runs of a shell command. It keeps all trials and writes
the best values.

This is what ``leaven tune recipe.toml --study FOLDER`` does, in order. The ten files in bold are the search; the
others are details of a step. A point is one value for each searched hyperparameter. A trial is one training at a
point with one seed. If the process of a trial dies, the trial gets another attempt.

1. **cli/tune.py** reads the recipe, makes the search space (**space.py**) and tokenises the recipe's text.
   :class:`BaseStudy`, in this file (**study.py**), checks the arguments and the folder (``study_folder.py``), and
   opens the store: a journal in the folder, or a database. The store is an Optuna storage. It has all attempts at all
   trials, with their losses and curves, so a killed search can resume, and several commands and machines can share a
   study. The first command stores the recipe and the other settings there. A later command with other settings is
   refused (``study_settings.py``).
2. :meth:`BaseStudy.run` runs the loop of the search (**search_loop.py**) until the budget is used, by default 32
   trials. The loop asks a :class:`SearchPlan` (**search_plan.py**) for the next trial: first the start (the point of
   the recipe itself), then new points, then some of the best points again. **algorithm/trust_region.py** proposes the
   new points, from a model of the loss fitted to the trials so far (``algorithm/surrogate.py``). You can read these
   two files on their own. The loop creates the trial in the store, and records its outcome there
   (``stored_study.py``). It also takes over the trials of commands that have died.
3. The loop calls the objective, which :meth:`BaseStudy._trainer` makes. For a recipe, it is the :class:`TrialTrainer`
   in **recipe_study.py**. It puts the values of the point into the recipe (:meth:`Space.recipe_at`) and trains the
   recipe in a worker process (**training/trial.py**), or several recipes at once (``training/stack.py``). A single
   recipe is trained as by ``leaven train``, but without run folder, metrics and spike guard. The trial's loss is the
   validation loss after the last step. For a shell command, the objective is the ``CommandTrainer`` in
   ``command_study.py``.
4. A trial ends early if it diverges, or is pruned because it is too far behind the best trial
   (``training/early_stopping.py``). This limit depends on the noise: the standard deviation of the loss between seeds
   (``algorithm/noise.py``). Up to 3 trials of the start measure the noise. They begin before the first new point.
5. The search usually ends with final trials of the best points (the finalists), with fresh seeds. The budget decides
   how many (``FINALS``). From their losses, **algorithm/answer.py** chooses a point: the start, unless the best
   point gains clearly more than the noise. The reported loss is the mean over trials that were not used to choose
   the point, if there are any. Its 95% interval is mean +- t x noise / sqrt(trials).
6. :meth:`BaseStudy.save` writes the study's document (``study_document.py``) to study.json, at the start and when
   trials end. Once the search has ended, it also writes best.toml and perhaps fewest.toml (``write_results`` in
   **study_folder.py**).
7. ``leaven tune`` prints a line for each trial, and at the end the best values and the commands to type next
   (``views/terminal/study.py``, with sentences from ``views/points.py``).
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import optuna
from optuna.storages import BaseStorage

from leaven.errors import InputError
from leaven.storage import make_folder, write_text
from leaven.tuning.algorithm.answer import answer
from leaven.tuning.algorithm.trust_region import radius_of, results
from leaven.tuning.earlier_study import earlier_trials
from leaven.tuning.service.samplers import ped_anova
from leaven.tuning.service.search_loop import Objectives, Proposal, SearchLoop
from leaven.tuning.service.search_plan import (
    LEAST_ROUNDS,
    Budget,
    SearchPlan,
    by_surrogate,
    check_search,
    known_trials,
    most_at_once,
)
from leaven.tuning.service.stores import StoreGone, exists, open_store
from leaven.tuning.service.study_folder import StudyFolder, write_results
from leaven.tuning.service.study_settings import join_study, unused_knowledge
from leaven.tuning.space import SearchSpace, Space
from leaven.tuning.study_document import StudyDocument, front

ANSWERED = "leaven:answered"  # an attribute of a study, set once a command has run the search to its end
# After so many seconds without the store, the screen says so, and a stopped command no longer waits for the store.
NOTE_AFTER = 5.0
NOTE_EVERY = 10.0  # seconds until the screen says so again
SAVING = 0.1  # the largest share of the time for writing study.json: seconds with thousands of trials


class Screen(Protocol):
    """The interface of a screen that shows a running study."""

    def started(self, number: int, worker: str, /) -> None: ...
    def ended(self, state: StudyDocument, /) -> None: ...
    def note(self, text: str, /) -> None: ...


class NoScreen:
    def started(self, number: int, worker: str, /) -> None: ...
    def ended(self, state: StudyDocument, /) -> None: ...
    def note(self, text: str, /) -> None: ...


class BaseStudy(ABC):
    """A context manager for a study. The study is in a folder, or in a database with a folder for the results.

    Args:
        out: the folder.
        store: the URL of a database. By default, the study is in an Optuna journal in the folder.
        noise: the standard deviation of the loss between seeds, in nats per token, if it is known.
        from_study: the folder of an earlier study. Its trials and its noise are prior knowledge for this study.
        shared: settings that must be equal in all commands on the study, in addition to the recipe.
        run_flops: FLOPs of a trial, if they are known.
        about: further fields of study.json, such as ``command``.

    The constructor raises InputError if the folder cannot be used or has another study, if the earlier study cannot
    be used, or if the method is unknown or cannot use the prior knowledge. Entering the context raises InputError if
    the store is lost or contains another study.
    """

    stack = 1  # number of trials that a worker trains at once

    def __init__(
        self,
        out: Path,
        space: SearchSpace,
        method: str,
        store: str | None,
        *,
        noise: float | None,
        from_study: Path | None,
        shared: Mapping[str, Any],
        run_flops: float | None = None,
        about: Mapping[str, Any],
    ) -> None:
        self._noise_given = noise is not None
        if from_study is not None:
            earlier, known = earlier_trials(from_study, space)
            space, noise = replace(space, earlier=earlier), known if noise is None else noise
        check_search(method, space.axes, space.name)
        self.out, self.space, self.method = out, space, method
        self._shared, self._about, self._noise = shared, about, noise
        self._run_flops = run_flops
        self._where: str | Path = store or out / "journal.log"
        self._name = f"--study {store or out}"
        self._folder = StudyFolder(out, self._name)
        self._stalled = False  # whether the search ended early because some rounds gained less than the noise
        self.nothing = ""  # why :meth:`run` found no best point; empty if it found one
        self._screen: Screen = NoScreen()
        self._note: Callable[[str], None] = lambda text: None
        self._stop: Callable[[], bool] = lambda: False
        self._ready: Callable[[], bool] = lambda: True  # whether a trial may begin
        self._next_save = self._next_note = 0.0  # by time.monotonic()
        self._noted: set[str] = set()
        self._folder.check(space, self._where, runs_command=bool(about.get("command")))

    @abstractmethod
    def _trainer(self, devices: Sequence[str | None]) -> AbstractContextManager[Objectives]:
        """Return a context manager that yields the objective. One thread for each of the ``devices`` calls it."""

    def reporting_to(self, note: Callable[[str], None], stop: Callable[[], bool]) -> Self:
        """Return this study. While it waits for a locked store, it will call ``note`` and ``stop``."""
        self._note, self._stop = note, stop
        return self

    def __enter__(self) -> Self:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        saved_id, saved = self._folder.saved_results()
        store = self._open_store()
        self._stored = join_study(
            store,
            self.space.name,
            self._name,
            "give the same settings, or use another --study",
            method=self.method,
            axes=self.space.axes,
            seed=self.space.seed,
            noise=self._noise,
            own_noise=self._noise_given,
            # Commands on other machines have another folder, so the recipe is in the store, too.
            recipe=self.space.recipe if isinstance(self.space, Space) else None,
            shared=self._shared,
        )
        for line in unused_knowledge(self.space.axes, self._stored.axes):
            self._note(f"caution: {line}")
        self._folder.require_same_study(saved_id, self._stored.random_id)
        self._folder.require_results(saved, self._stored.read())
        self.space = self.space.knowing(self._stored.axes.expected, self._stored.axes.earlier)
        self._claim_folder()
        return self

    def _claim_folder(self) -> None:
        """Write centre.toml and study.json if they are missing. Raise InputError if another study has the folder."""
        make_folder(self.out)
        with self._folder.lock():
            saved_id, saved = self._folder.saved_results()
            self._folder.require_same_study(saved_id, self._stored.random_id)
            if not (self.out / "centre.toml").exists():
                write_text(self.out / "centre.toml", self.space.text_at({}, {}))
            if not (saved_id or saved):
                with suppress(InputError):  # a full disk: it is written again when trials end
                    self._write()

    def __exit__(self, *exception: object) -> None:
        self._stored.store.remove_session()

    def _open_store(self) -> BaseStorage:
        """Return the opened store. Raise InputError if it is lost, cannot be written or belongs to another study."""
        begun = any((self.out / name).exists() for name in ("centre.toml", "study.json"))
        lost = InputError(
            f"{self.out} has a study, but the store of {self._name} does not have it; restore the store, or use "
            "another folder"
        )
        if begun and not exists(self._where):
            raise lost
        if isinstance(self._where, Path):
            make_folder(self.out)
            for file in (self._where, self._where.with_name(f"{self._where.name}.flock")):
                if file.exists() and not os.access(file, os.R_OK | os.W_OK):
                    raise InputError(
                        f"{file}: you have no permission to read and write it; its owner can type "
                        f"chmod g+rw {file} (if its disk is not read-only)"
                    )
        store, name = open_store(self._where, self._waited), self.space.name
        stored = {study.study_name: study.user_attrs for study in store.get_all_studies()}
        if stored and name not in stored and isinstance(self._where, Path):
            raise InputError(f"{self._name} contains the study {next(iter(stored))}, not {name}; use another --study")
        # The settings are missing if a journal was cut within the line that has them.
        if begun and not stored.get(name):
            raise lost
        return store

    def _waited(self, seconds: float, cause: str) -> None:
        """Tell the user how long the store has been unreachable. Raise StoreGone if the user stops the command."""
        if seconds <= NOTE_AFTER:
            return
        if self._stop():
            raise StoreGone(
                f"stopped after the store had been unreachable for {seconds:.0f} s; "
                "run the same command again to resume"
            )
        if (now := time.monotonic()) >= self._next_note:
            self._next_note = now + NOTE_EVERY
            self._note(f"the store has been unreachable for {seconds:.0f} s ({cause}); waiting")

    def run(
        self,
        trials: int | None,
        workers: int,
        *,
        flops: float | None = None,
        hours: float | None = None,
        devices: Sequence[str] = (),
        screen: Screen | None = None,
        stop: Callable[[], bool] = lambda: False,
        stop_at_noise: bool = True,
    ) -> StudyDocument:
        """Run trials, including final trials, until the budget is used. Return the study's document.

        All commands that work on the study share the budget. The search ends early if ``stop`` returns true.
        With ``stop_at_noise``, a trust-region search also ends after several rounds with gains below the noise.

        Args:
            trials, flops, hours: see :class:`leaven.tuning.service.search_plan.Budget`.
            workers: number of workers; each trains one trial, or one stack of trials, at a time.
            devices: the GPUs of each worker, as in ``CUDA_VISIBLE_DEVICES``; by default, every worker sees all GPUs.

        Raises:
            StoreGone: if the store stays unreachable for 300 seconds, if the user stops the command while the store
                is unreachable, or if results cannot be written.
            InputError: if no budget is given, if the study cannot continue (for example, its command is wrong), if
                its folder now has another study, or after four failed trials in a row on this machine.
        """
        self._screen, self._stop = screen or NoScreen(), stop
        self._note = self._screen.note
        at_once = workers * self.stack
        if by_surrogate(self.method) and trials is not None and at_once > most_at_once(trials):
            self._note(
                f"caution: {at_once} trials at once are more than 1/{LEAST_ROUNDS} of all {trials} trials; they do "
                "not learn from each other, so the best values may be worse than with fewer --workers or a smaller "
                "--stack"
            )
        budget, seed = Budget(trials, flops, hours, self._run_flops), self.space.seed
        plan = SearchPlan(self._stored.axes, self.method, seed, budget, self._stored.noise, stop_at_noise)
        with (
            self._trainer(devices or [None] * workers) as trainer,
            SearchLoop(plan, self._stored, trainer, workers, stop, stack=self.stack, ready=self._may_begin) as loop,
        ):
            for event in loop:
                if isinstance(event, Proposal):
                    self._screen.started(event.number, f"w{event.worker + 1}")
                else:
                    self._save_meanwhile()
        found = plan.chosen(loop.trials) is not None
        over = found and not stop()
        self._stalled = over and plan.ended_early(loop.trials, self._stored.now())
        self.nothing = "" if found else self.state().advice or plan.why_nothing(loop.trials)
        if over:
            self._stored.study.set_user_attr(ANSWERED, True)
        self._remove_checkpoints()
        try:
            state = self.save()
        except InputError as error:
            raise StoreGone(
                f"{error}; the trials are in the store: run the same command again to write the results"
            ) from None
        self._screen.ended(state)
        return state

    def check_budget(self, trials: int | None, hours: float | None) -> None:
        """Raise InputError if the budget is missing or invalid, or if ``trials`` is too small for method ``grid``."""
        known_trials(self.space.axes, self.method, Budget(trials, None, hours, self._run_flops), self._noise)

    def _may_begin(self) -> bool:
        self._folder.require_own(self._stored.random_id)
        return self._ready()

    def _remove_checkpoints(self) -> None:
        self._folder.require_own(self._stored.random_id)
        self._folder.remove_checkpoints(self._stored.trials)

    def _save_meanwhile(self) -> None:
        self._remove_checkpoints()
        began = time.monotonic()
        if began < self._next_save:
            return
        try:
            state = self.save()
        except InputError as error:  # for example a full disk; the trials are in the store
            self._note(str(error))
            return
        self._screen.ended(state)
        now = time.monotonic()
        self._next_save = now + (now - began) * (1 / SAVING - 1)

    def state(self) -> StudyDocument:
        """Return the study's document. Its ``best`` is None until a command has finished the search for the first
        time, and stays set if a later command continues the search with a larger budget."""
        space, stored, ranks_by_surrogate = self.space, self._stored.trials, by_surrogate(self.method)
        over = bool(self._stored.study.user_attrs.get(ANSWERED))
        found = answer(
            stored,
            space.dimensions,
            self._stored.noise,
            over=over,
            by_surrogate=ranks_by_surrogate,
            optunas=ped_anova,
            earlier=space.earlier,
        )
        trials = tuple(trial.document(space.values(trial.octaves or {})) for trial in stored)
        _, _, losses = results(stored, space.axes)
        return StudyDocument(
            **vars(found) | {"best": found.best if over else None, "trials": trials},
            id=self._stored.random_id,
            name=self._stored.study.study_name,
            method=self.method,
            space=space.paths,
            radius=radius_of(space.axes, losses) if ranks_by_surrogate else None,
            stalled=self._stalled,
            front=front(trials),
            **self._about,
        )

    def save(self) -> StudyDocument:
        """Write study.json and the recipes of the best points. Return the study's document. Raise InputError if a
        file cannot be written, or if study.json belongs to another study."""
        with self._folder.lock():  # another command may save, too
            return self._write()

    def _write(self) -> StudyDocument:
        self._folder.require_own(self._stored.random_id)
        try:
            state = self.state()
            return write_results(self.out, self.space, state, self._note_once, self._inputs(state))
        except OSError as error:
            raise InputError(f"{self.out}: cannot be written: {error.strerror}") from None

    def _inputs(self, state: StudyDocument) -> Mapping[str, str]:
        """Return {path in the study's folder: content} of the files to write in addition to best.toml."""
        return {}

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)
