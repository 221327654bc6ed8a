"""The folder of a study: check that it belongs to the study in the store, and write the results into it.

- ``study.json``: the study's document.
- ``centre.toml``: the recipe or command file at the start of the search.
- ``best.toml``: after the search, the best point.
- ``best``: in a study of a command, the files that it reads at the best point.
- ``fewest.toml``: if found, an equally good point with fewer changes.
- ``checkpoints``: the checkpoints of trials that have not ended.
- ``trials``: the folders in which commands run.
- ``journal.log``: the store, unless the study is in a database.
"""

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from itertools import count
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from leaven import storage
from leaven.documents import sealed
from leaven.errors import InputError
from leaven.recipe.units import format_number
from leaven.scaling.transfer import searched_paths, study_start
from leaven.storage import digest, make_folder, read, require_writable, write_text
from leaven.training.run_folder import RunFolder, describe_changes
from leaven.tuning.point import BATCH, TOKENS, moved
from leaven.tuning.service.stored_study import StoredTrial, TrialLog
from leaven.tuning.space import SearchSpace, Space
from leaven.tuning.study_document import UNDER_WAY, StudyDocument, signed

CHECKPOINTS, LOCK = "checkpoints", ".study.lock"  # runs and checks have another lock
# Names in the folder of a study that was killed before it wrote study.json.
OURS: tuple[str, ...] = ("journal.log*", ".*.tmp", LOCK)
_ATTEMPT = re.compile(r"([0-9]{6,18})-[0-9]{6,18}")  # (number of the first attempt)-(number of the attempt)
_TRIAL = re.compile(r"[0-9a-f]{24}|stack-[0-9]+")  # names of the folders in an attempt's folder (training)
_ID = re.compile(rb'^  "id": "(\w+)"', re.MULTILINE)  # in study.json; decoding the whole file takes long
LOCK_SECONDS = 30  # how long to wait for the lock of the folder; a process that holds it longer is suspended


def attempts(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoint folders of attempts in ``folder`` as (number of the trial's first attempt, path), sorted
    by name. Folders with another kind of name or with other content are left out."""
    named = ((_ATTEMPT.fullmatch(path.name), path) for path in sorted(folder.glob("*-*")))
    return [
        (int(name[1]), path)
        for name, path in named
        if name and all(_TRIAL.fullmatch(entry.name) for entry in path.glob("[!.]*"))
    ]


def free_name(path: Path) -> Path:
    """Return ``path`` with the first ending .1, .2, ... that is still free."""
    names = (path.with_name(f"{path.name}.{k}") for k in count(1))
    return next(name for name in names if not os.path.lexists(name))  # exists is false for a link to a missing disk


@dataclass(frozen=True)
class StudyFolder:
    path: Path
    study: str  # what messages call the study: ``--study`` and the folder or the URL of the store

    def check(self, space: SearchSpace, where: str | Path, *, runs_command: bool) -> None:
        """Raise InputError if the folder is unusable, has other files, or has a study of another recipe or command.
        ``where`` is the URL or the journal of the store. ``runs_command``: whether trials run a shell command."""
        require_writable(self.path)
        out = self.path.absolute()
        if file := next((path for path in (out, *out.parents) if path.is_file()), None):
            raise InputError(f"{file} is a file; give a folder")
        centre = self.path / "centre.toml"
        if centre.exists():
            saved = _saved(out)
            if saved and bool(saved.get("command")) != runs_command:
                other = "recipe" if runs_command else "command"
                raise InputError(f"{self.path} belongs to a study that tunes a {other}; use another --study or --out")
            try:
                changes = space.changes_since(centre)
            except InputError as error:
                raise InputError(
                    f"{error}; if this file is damaged, remove it and run the same command again, which rewrites it"
                ) from None
            if changes:
                kind = space.kind
                raise InputError(f"{self.path} has another {kind}: {describe_changes(changes)}; use another --study")
        elif self.path.exists() and not (self.path / "journal.log").exists() and not self.saved_results()[0]:
            own = OURS
            if str(where).startswith("sqlite:"):  # the database and its journals may be here
                own = (*OURS, f"{escape(Path(str(where).partition('?')[0]).name)}*")
            others = [entry for entry in self.path.iterdir() if not any(fnmatch(entry.name, name) for name in own)]
            # CHECKPOINTS may be a link to an empty disk.
            if any(entry.name != CHECKPOINTS or any(entry.glob("[!.]*")) for entry in others):
                raise InputError(f"{self.path} is not empty and contains no study; use another folder")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder. Continue without a lock if none is available within ``LOCK_SECONDS``."""
        with ExitStack() as held:
            with suppress(OSError):
                held.enter_context(storage.lock(self.path / LOCK, LOCK_SECONDS))
            yield

    def saved_results(self) -> tuple[str, dict[int, float | None]]:
        """Return the study's id and {trial number: loss} for the trials with a result, from study.json; both empty if
        it is missing or damaged. Raise InputError on read errors."""
        document = _saved(self.path)
        try:
            # A failed trial may be given back to the study, and then runs again.
            ended = [trial for trial in document["trials"] if trial["state"] not in {*UNDER_WAY, "failed"}]
            losses = {trial["number"]: trial.get("loss") for trial in ended if isinstance(trial["number"], int)}
            return document.get("id", ""), losses
        except (TypeError, KeyError, AttributeError):
            return "", {}

    def require_results(self, saved: Mapping[int, float | None], log: TrialLog) -> None:
        """Raise InputError if ``log`` lacks a trial of ``saved`` or has another loss for it. The ids of studies do
        not show it: a copy of a study has the same id, but its later trials have other losses."""
        file, ended = self.path / "study.json", [trial for trial in log.trials.values() if trial.has_result]
        # If the copy of a study made another attempt at a trial, only its first attempt has the same number.
        losses = {trial.origin: trial.loss for trial in ended} | {trial.number: trial.loss for trial in ended}
        if lost := saved.keys() - losses.keys():
            raise InputError(
                f"{self.path} has the results of {len(saved)} trials, but the store of {self.study} has lost "
                f"{len(lost)} of them, the first is trial {min(lost)}; restore the store, or type "
                f"{shlex.join(['mv', str(file), f'{file}.old'])} to go on without them"
            )
        if others := [number for number, loss in saved.items() if losses[number] != loss]:
            raise InputError(
                f"{file} has the loss {saved[others[0]]} for trial {others[0]}, but {self.study} has "
                f"{losses[others[0]]}; one of the two is probably from a copy of the study; give the store that "
                "belongs to this folder; if study.json or the store was replaced, restore it; or use another folder"
            )

    def require_own(self, stored_id: str) -> None:
        """Raise InputError if the folder now belongs to a study other than ``stored_id``."""
        with suppress(OSError):
            if found := _ID.search(read(self.path / "study.json")):
                self.require_same_study(found[1].decode(), stored_id)

    def require_same_study(self, saved_id: str, stored_id: str) -> None:
        """Raise InputError unless the id in study.json is empty or equals the id in the store."""
        if saved_id and stored_id != saved_id:
            raise InputError(
                f"{self.path / 'study.json'} belongs to the study {saved_id}, but {self.study} contains the study "
                f"{stored_id}; give the store that belongs to this folder; if study.json or the store was replaced, "
                "restore it; or use another folder"
            )

    def remove_checkpoints(self, trials: Sequence[StoredTrial]) -> None:
        """Remove the checkpoints of ended trials. Raise InputError if another study or run uses the folder."""
        run = RunFolder(self.path)
        run.require_own_checkpoints()
        if (owner := run.owner()) and owner != str(self.path.resolve()) and os.path.exists(owner):
            raise InputError(f"{run.checkpoints} has the checkpoints of {owner}; bring back those of this study")
        ended = {trial.origin for trial in trials if trial.state not in UNDER_WAY}
        for origin, folder in attempts(self.path / CHECKPOINTS):
            if origin in ended:
                shutil.rmtree(folder, ignore_errors=True)


def write_results(
    out: Path,
    space: SearchSpace,
    state: StudyDocument,
    note: Callable[[str], None] = lambda text: None,
    inputs: Mapping[str, str] | None = None,
) -> StudyDocument:
    """Write study.json and return its content. Write the best point to best.toml. If another point with fewer
    changes to the start is as good, write it to fewest.toml; otherwise remove fewest.toml.

    A file that the user has edited is never overwritten or removed. If the search has found another point for this
    file, the edited file is renamed and a new file is written.

    Args:
        note: receives a line for the user if an edited file stays or is renamed.
        inputs: texts of further files for the best point, by path in ``out``.
    """
    before, written = _saved(out), dict[str, str]()
    # Without known digests, for example if study.json is damaged, every file counts as edited.
    known: dict[str, str] = before["written"] if isinstance(before.get("written"), dict) else {}
    answers: list[tuple[str, str, str | None]] = []  # name, field of the point in the document, text
    if state.best is not None:
        for file, key, fewest in (("best.toml", "octaves", False), ("fewest.toml", "fewest_octaves", True)):
            text, point = None, state.fewer if fewest else state.octaves
            if point is not None:
                text = space.text_at(point, {each: reason(each, state, space, fewest=fewest) for each in space.paths})
            answers.append((file, key, text))
        answers += [(file, "octaves", text) for file, text in (inputs or {}).items()]
    for file, key, text in answers:
        path = out / file
        there = _digest_on_disk(path)
        edited = there is not None and there != known.get(file)
        if text is None:  # remove the file of an earlier answer
            if not edited:
                path.unlink(missing_ok=True)
            continue
        new = digest(text.encode(errors="replace"))
        if edited and there != new:
            if before.get(key) == getattr(state, key):
                note(f"{path} was edited, so it is not overwritten; remove it to have it written again")
                written[file] = known.get(file, new)
                continue
            moved = free_name(path)
            # Before it is renamed: a kill in between must not leave it renamed without a line.
            note(f"{path} was edited; it is renamed to {moved}, because the result of the search has changed")
            path.rename(moved)
        make_folder(path.parent)
        write_text(path, text)
        written[file] = new
    state = state.model_copy(update={"written": written})
    document = sealed(json.loads(state.model_dump_json()))
    write_text(out / "study.json", to_json(document, indent=2).decode() + "\n")
    return state


def _saved(out: Path) -> dict[str, Any]:
    """Return the content of study.json, or {} if it is missing or no JSON object. Raise InputError on read errors."""
    path = out / "study.json"
    try:
        document = json.loads(read(path))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return document if isinstance(document, dict) else {}


def _digest_on_disk(path: Path) -> str | None:
    """Return a file's digest, None if there is no file, or "unknown" for a link or an unreadable file."""
    try:
        return "unknown" if path.is_symlink() else digest(read(path))
    except FileNotFoundError:
        return None
    except OSError:
        return "unknown"


def reason(path: str, state: StudyDocument, space: SearchSpace, *, fewest: bool = False) -> str:
    """Return why ``path`` has its value, for the ``[why]`` of best.toml or, with ``fewest``, fewest.toml."""
    point, best = (state.fewest_octaves, state.fewest) if fewest else (state.octaves, state.best)
    assert point is not None
    assert best is not None
    start = space.values({**point, path: 0.0})[path]
    if isinstance(start, bool):
        start = str(start).lower()
    elif not isinstance(start, str):  # numbers of tokens are exact, because `transfer_like` reads them
        start = f"{start:,}" if isinstance(start, int) else format_number(start)
    seeds = f" over {best.fresh} fresh seeds" if best.fresh > 1 else ""
    parts = [
        f"study {state.name}, trial {best.number} ({state.method}, {len(state.trials)} trials)",
        f"validation loss {best.loss:.4f}, {best.certainty}{seeds}",
    ]
    if state.informed:
        parts += ["the search used what laws or an earlier study said"]
    if fewest:
        parts += ["the point with the fewest changes whose loss equals the best loss within the noise"]
    if not point[path]:
        note = space.why.get(path)
        parts += ["as at the start", *([note] if note and not note.startswith("study ") else [])]
    elif fewest:
        parts += [f"the start has {start}"]
    else:
        each = next(coordinate for coordinate in state.coordinates if coordinate.path == path)
        # Sorted, because a beta falls when its distance grows.
        ends = [space.values({**point, path: octaves})[path] for octaves in each.flat]
        chosen, of = space.values(point)[path], state.dimension(path)
        if type(chosen) is int and of.unit != "choice":  # both ends lie inside, or are the value itself
            unit = space.recipe.model.seq_len if isinstance(space, Space) and path == BATCH else 1
            low, high = (round(moved(of.unit, float(of.centre), octaves) / unit, 6) for octaves in each.flat)
            low, high = min(math.ceil(low) * unit, chosen), max(math.floor(high) * unit, chosen)
            parts += [f"from {low:,} to {high:,}, the loss is equal within the noise"]
        elif numbers := sorted(end for end in ends if not isinstance(end, str | bool)):
            parts += [
                f"from {format_number(numbers[0])} to {format_number(numbers[1])}, the loss is equal within the noise"
            ]
        doubt = "" if each.worth else ", not known to be more than the noise"
        parts += [
            f"the start's {start} changes the loss by {signed(each.gain)} +-{each.gain_deviation:.4f} nats{doubt}"
        ]
    if isinstance(space, Space) and path in (BATCH, TOKENS) and path in searched_paths(space.recipe):
        parts += [f"an earlier study began with {study_start(space.recipe, path):,}"]
    return "; ".join(parts)
