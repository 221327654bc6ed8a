"""Finds files of a run that are missing, were changed, or belong to another run. Does not import torch.

Each run has a random identifier. The run's start events, the first line of its metrics, plan.json and every
checkpoint contain this identifier. A checkpoint also contains the recipe, and digests of the tokenizer, metrics and
events. A value that a file lacks is not compared.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from leaven import storage
from leaven.documents import is_sealed
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import NOT_NUMBERS, Difference, Recipe, differing
from leaven.recipe.units import format_quantity
from leaven.training.run_folder import (
    IDENTITY,
    LOCK,
    RETURNS,
    WRONG_TYPES,
    RunFolder,
    changeable,
    changes_of,
    checkpoint_name,
    checkpoints,
    describe_changes,
    finish_of,
    newest_document,
    tokens_of,
)
from leaven.training.run_lines import EVENTS, METRICS, changed_lines, lines_digest

RECIPE = "recipe"  # key of the recipe in the state of a checkpoint
TOKENIZER = "tokenizer"  # key of the digest of tokenizer.json in the state of a checkpoint
_FIRST_LINE = 2**20  # bytes; the first line of the metrics is shorter


def require_run_of(run: RunFolder, recipe: Recipe) -> None:
    """Raise InputError unless a run folder is new, empty, or has all files of a run of this recipe. Layout and
    micro-batch may differ."""
    storage.require_folder_name(run.path)
    if run.path.exists() and not run.path.is_dir():
        raise InputError(f"{run.path} is a file; --run needs a folder")
    if not run.recipe_file.exists():
        # Temporary files left by an interrupted write of the recipe, the first file, belong to this run.
        known = (LOCK, f".{run.recipe_file.name}.*.tmp")
        entries = run.path.iterdir() if run.path.exists() else ()
        if not all(entry.is_file() and any(fnmatch(entry.name, name) for name in known) for entry in entries):
            if checkpoints(run.checkpoints):
                raise InputError(
                    f"run folder {run.path} has lost its recipe.toml; copy the run's original recipe to "
                    f"{run.recipe_file}, and run the same command again"
                )
            raise InputError(f"run folder {run.path} is not empty and holds no recipe.toml; use another --run")
        if begun_under_torchrun(run):
            raise InputError(
                f"run folder {run.path} was deleted or moved since torchrun started; bring it back (is its disk "
                "mounted?) and run torchrun again; if the folder is still missing then, a new run starts"
            )
        storage.require_writable(run.path)
        return
    for file in (run.events_file, run.metrics_file):
        storage.require_plain_file(file)
    storage.require_target(run.checkpoints, "bring it back, or put a folder in place of the link")
    begun = run.recipe()
    if changes := changes_of(begun, recipe):
        possible = all(changeable(path) for path, _, _ in changes)
        or_back = ", or --rewind-to to change the recipe from a checkpoint on" if possible else ""
        moved = all(path == "data.source" and isinstance(now, str) for path, _, now in changes)  # one source
        if_moved = f", or, if the text was only moved, write its new path in {run.recipe_file}" if moved else ""
        raise InputError(
            f"run folder {run.path} holds a run of another recipe: {describe_changes(changes)}; "
            f"use another --run{or_back}{if_moved}"
        )
    require_own_files(run, newest_state(run))
    if not checkpoints(run.checkpoints) and run.finish() is None and (trained := progress(run)):
        raise InputError(
            f"run folder {run.path} has no checkpoints, but {trained}; bring back {run.checkpoints} "
            "(is its disk mounted?), or start again with another --run"
        )


def faults(run: RunFolder) -> Iterator[str]:
    """Yield a sentence about each file that is changed, missing, unreadable, or of another run."""
    yield from changed_files(run).values()
    yield from foreign_files(run, newest_state(run))


def changed_files(run: RunFolder) -> dict[str, str]:
    """Return {file name: a sentence about its change} for files that are not as the run wrote them, including missing
    steps in metrics.jsonl, and earlier changes that ``file_changed`` events report."""
    finish = finish_of(run.read_events())
    when = "as the run wrote it" if finish is None else "as it was when the run finished"
    found = {file: f"{run.path / file} is not {when}: {why}" for file, why in changed_since(run, finish).items()}
    before = [*_missing_steps(run), *_changed_before(run)]
    return {file: f"{run.path / file} is not as the run wrote it: {why}" for file, why in before} | found


def require_own_files(run: RunFolder, state: Mapping[str, Any]) -> None:
    """Raise InputError if a file of a run does not fit a checkpoint with this ``state`` (:func:`foreign_files`)."""
    if (fault := next(foreign_files(run, state), None)) is not None:
        raise InputError(fault)


def foreign_files(run: RunFolder, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each file that does not fit a checkpoint with this ``state``: it belongs to another
    run, was changed after the checkpoint, or cannot be read."""
    found = list(_identities(run, state))
    other = next((file for file, identity in found if identity != found[0][1]), None)
    if other is not None:
        where = f"{other} has lines of" if other == found[0][0] else f"{found[0][0]} and {other} belong to"
        yield f"{where} different runs; restore the files of one run, or start again with another --run"
    try:
        run.require_own_checkpoints()
    except InputError as error:
        yield str(error)
    if _has_other_rewinds(run):
        yield (
            f"{run.events_file} and {run.checkpoints} belong to different copies of a run, with different rewinds; "
            "restore both from one copy"
        )
    try:
        there = tokenizer_digest(run)
        if there is not None and state.get(TOKENIZER, there) != there:
            yield (
                f"{run.tokenizer_file} is not the tokenizer with which the run was trained; bring back the file of "
                "this run"
            )
    except InputError as error:
        yield str(error)
    if changes := _changes_of_recipe(run, state):
        yield f"{run.recipe_file} was changed after the checkpoint: {describe_changes(changes)}; change it back"


def _has_other_rewinds(run: RunFolder) -> bool:
    """Return whether events.jsonl and the newest checkpoint disagree about a rewind that both record."""
    saved = newest_document(run).get("rewinds", ())
    for event in run.read_events():
        if event["event"] in RETURNS:
            with suppress(*WRONG_TYPES):  # damage is reported when the rewinds are read
                pairs = zip([*event["earlier_rewinds"], event], saved, strict=False)
                if any(one[key] != other[key] for one, other in pairs for key in ("to_tokens", "skip_to", "lr")):
                    return True
    return False


def _identities(run: RunFolder, state: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield (file, identifier of the run that wrote it). ``state`` comes from a checkpoint."""
    first = b""
    with suppress(OSError), storage.open_file(run.metrics_file) as file:
        first = file.readline(_FIRST_LINE)
    documents = [
        *((run.events_file, event) for event in run.read_events()),
        (run.metrics_file, storage.json_object(first) or {}),
        (run.checkpoints, state),
    ]
    for path, document in documents:
        if isinstance(identity := document.get(IDENTITY), str):
            yield path, identity


def identity_of(run: RunFolder, state: Mapping[str, Any]) -> str | None:
    """Return the random identifier of a run, or None if no file has one. ``state`` comes from a checkpoint."""
    return next((identity for _, identity in _identities(run, state)), None)


def newest_state(run: RunFolder) -> dict[str, Any]:
    """Return the callbacks' state in the newest checkpoint that is neither damaged nor undone by a rewind, or {}."""
    returns = [event for event in run.read_events() if event["event"] in RETURNS]
    state = newest_document(run, returns[-1] if returns else None).get("state")
    return state if isinstance(state, dict) else {}


def tokenizer_digest(run: RunFolder) -> str | None:
    """Return a digest of tokenizer.json that does not depend on its formatting, or None without this file."""
    try:
        content = storage.read(run.tokenizer_file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{run.tokenizer_file}: cannot be read: {error.strerror}") from None
    return storage.digest(_canonical(content), 16)


def _canonical(tokenizer: bytes) -> bytes:
    """Return the JSON of a tokenizer without its formatting. Return other content unchanged."""
    try:
        return json.dumps(json.loads(tokenizer), sort_keys=True).encode()
    except (ValueError, RecursionError):
        return tokenizer


def require_tokenizer(run: RunFolder, path: Path) -> None:
    """Raise InputError if the tokenizer.json in the run folder differs from the file at ``path``."""
    from tokenizers import Tokenizer

    with suppress(FileNotFoundError):
        there, ours = storage.read(run.tokenizer_file), storage.read(path)
        if _canonical(there) == _canonical(ours):
            return
        with suppress(Exception):  # tokenizers raises no narrower class
            if Tokenizer.from_buffer(there).to_str() == Tokenizer.from_buffer(ours).to_str():
                return  # written by another version of tokenizers
        raise InputError(
            f"{run.tokenizer_file} is not the tokenizer of the text; remove it, so that the right one is written, or "
            "use another --run"
        )


def saved_recipe(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"why"}, exclude_none=True)


def _changes_of_recipe(run: RunFolder, state: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between the trained recipe, if known, and recipe.toml. Values from before the recipe's
    last change are no differences: a process may have been killed before it wrote the file."""
    there, change = _trained_values(read_recipe(run.recipe_file)), run.last_change()
    if change is not None:
        recipe, before = change
        if run.rewinds_ahead(run.read_events()) == 0:
            with suppress(KeyError, ValidationError):
                recipe = Recipe.model_validate(newest_state(run)[RECIPE])
        changes = differing(_trained_values(recipe), there)
        return [each for each in changes if each[0] not in before or before[each[0]] != each[2]]
    try:
        return differing(_trained_values(Recipe.model_validate(state[RECIPE])), there)
    except (KeyError, ValidationError):  # there is no checkpoint, or it has no recipe that this version reads
        return []


def _trained_values(recipe: Recipe) -> dict[str, Any]:
    """Return the values that a resumed run must keep. The path of the text may change if there is only one source."""
    values = recipe.model_dump(exclude=NOT_NUMBERS | {"start"})
    names = [source.source for source in recipe.data.sources]  # several names decide the order of the samples
    values["data"] |= {"source": recipe.data.proportions if len(names) == 1 else names, "tokenizer": None}
    values["data"]["weights"] = recipe.data.proportions
    values["batch"]["micro_batch"] = None
    return values


def require_text(run: RunFolder, fingerprint: str, saved: str | None = None) -> None:
    """Raise InputError if the run was trained on other text. Its fingerprint is the one in events.jsonl, or else
    ``saved``, the one in the checkpoint. If both are missing, any text is accepted."""
    if (run.text() or saved or fingerprint) != fingerprint:
        own = ""
        if run.tokenizer_file.exists():  # another version of tokenizers may train another BPE on the same text
            own = (
                f'; if only the tokenizer has changed, write tokenizer = "{run.tokenizer_file}" both in your recipe '
                f"and in {run.recipe_file}"
            )
        raise InputError(
            f"the run in {run.path} was trained on other text or other ends of documents: the files of [data] source "
            "or the tokenizer have changed since, or an older leaven took another token of the tokenizer for the end "
            f"of documents; use another --run{own}"
        )


_CURVES_BEGIN = 128  # bytes; a file of TensorBoard without a step has two records of about 40


def progress(run: RunFolder) -> str | None:
    """Return evidence that a run has trained ("metrics.jsonl says that the run has trained 5 steps"), or None. A run
    saves a checkpoint before its first step, so a run that has trained must have one."""
    if saved := saved_checkpoints(run):
        return f"{run.events_file.name} says that the run has trained {saved[-1]:,} tokens"
    read = run.read_metrics()
    if read.documents:
        return f"{run.metrics_file.name} says that the run has trained {read.documents[-1]['step']:,} steps"
    for file, first_keys in ((run.metrics_file, (IDENTITY, "step")), (run.events_file, ("event",))):
        if is_other_text(file, *first_keys) or (read.damaged and file == run.metrics_file):
            return f"{file.name} has lines that leaven cannot read"
    curves = (run.path / "tensorboard").glob("events.*")
    if any(file.stat().st_size > _CURVES_BEGIN for file in curves):
        return "tensorboard/ says that the run has trained at least one step"
    if run.plan_file.exists() and not run.events():  # the plan is written after the first event
        return f"{run.plan_file.name} says that the run has begun"
    return "the run had saved one before torchrun restarted it" if begun_under_torchrun(run) else None


def is_other_text(file: Path, *keys: str) -> bool:
    """Return whether a file has content that leaven did not write. Files of leaven begin with a JSON object whose
    first key is one of ``keys``. Return False for a missing or empty file."""
    with suppress(FileNotFoundError), storage.open_file(file) as opened:
        begin = opened.read(64).strip(b"\0\n")
        ours = [f'{{"{key}": '.encode() for key in keys]
        return not any(begin.startswith(each[: len(begin)]) for each in ours)
    return False


def saved_checkpoints(run: RunFolder) -> list[int]:
    """Return the token counts of the checkpoints that a run saved or loaded, in the order of events.jsonl, without
    those that a rewind has undone."""
    saved: list[int] = []
    for event in run.events():
        if event["event"] in RETURNS:
            saved = [tokens for tokens in saved if tokens <= event["to_tokens"]]
        tokens = event.get(_SAVED_TOKENS.get(event["event"], ""))
        if isinstance(tokens, int):
            saved.append(tokens)
    return saved


_SAVED_TOKENS = {"checkpoint": "tokens", "resume": "tokens", "rewind": "to_tokens", "rollback": "from_tokens"}


def unusable_checkpoints(run: RunFolder, damaged: Sequence[Path], tokens: int | None = None) -> str | None:
    """Return why none of a run's checkpoints (at ``tokens``, if given) can be used, or None if there are none. All
    that ``read_checkpoint`` did not return as ``damaged`` are reported as undone by a rewind."""
    there = (path for path in checkpoints(run.checkpoints) if tokens is None or tokens_of(path) == tokens)
    undone = [path for path in there if path not in damaged]
    found = [
        f"{why}: {', '.join(path.name for path in paths)}"
        for why, paths in (("damaged", damaged), (f"undone by a rewind, according to {run.events_file.name}", undone))
        if paths
    ]
    return f"no checkpoint can be used ({'; '.join(found)}); restore one from a backup" if found else None


def missing_checkpoint(saved: Sequence[int], found: int) -> str | None:
    """Return the name of the last checkpoint of ``saved`` if it has more tokens than the one that was found.

    Get ``saved`` from :func:`saved_checkpoints` before you look for a checkpoint. In the opposite order, a checkpoint
    that the run saves between the two would count as missing.
    """
    return checkpoint_name(saved[-1]) if saved and saved[-1] > found else None


def mark_begun(run: RunFolder) -> None:
    """Tell later restarts by torchrun that the run has begun and has a checkpoint. Without torchrun, do nothing."""
    mark = _torchrun_mark()
    if mark is not None:
        with suppress(OSError):
            mark.write_text(str(run.path.absolute()), encoding="utf-8")


def begun_under_torchrun(run: RunFolder) -> bool:
    """Return whether the run had already begun when torchrun restarted this process."""
    mark = _torchrun_mark()
    try:
        return mark is not None and mark.read_text(encoding="utf-8") == str(run.path.absolute())
    except (OSError, ValueError):
        return False


def _torchrun_mark() -> Path | None:
    """Return the path of the file that :func:`mark_begun` writes, or None without torchrun. The file is in
    torchrun's log folder, which torchrun keeps when it restarts the processes."""
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.parent / "leaven-run" if attempt.name.startswith("attempt_") else None


def changed_since(run: RunFolder, finish: Mapping[str, Any] | None) -> dict[str, str]:
    """Return {file or folder name: what has changed since the newest checkpoint and the ``finish`` event}.

    A file that cannot be read counts as changed. So do the checkpoints of a finished run if the last one is missing
    and others exist.
    """
    found: dict[str, str | None] = {}
    state, finish = newest_state(run), finish or {}
    for file, key, document in (
        (run.metrics_file, METRICS, finish or state),
        (run.events_file, EVENTS, state),  # another copy of the run may have been rewound
        (run.events_file, EVENTS, finish),
    ):
        try:
            complete = key == METRICS and bool(finish)
            why = changed_lines(run.lines_of(file), lines_digest(document.get(key)), complete=complete)
        except InputError as error:
            why = str(error)
        found[file.name] = why or found.get(file.name)
    if not is_sealed(finish):
        found[run.events_file.name] = "its finish event has been changed"
    there = [tokens_of(path) for path in checkpoints(run.checkpoints)]
    # If all checkpoints are gone, the user has probably removed them.
    if there and isinstance(finish.get("tokens"), int) and finish["tokens"] not in there:
        found[run.checkpoints.name] = f"{checkpoint_name(finish['tokens'])} is missing"
    return {file: why for file, why in found.items() if why is not None}


def _missing_steps(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield (file name, "2 steps are missing, the first is step 5") if metrics.jsonl lacks more steps before its last
    one than lines are damaged, which have their own message."""
    with suppress(InputError):  # changed_since reports a file that cannot be read
        read = run.read_metrics()
        steps = [line["step"] for line in read.documents]
        missing = steps[-1] - len(steps) if steps else 0
        if missing > len(read.damaged):
            first = next(due for due, step in enumerate(steps, start=1) if step != due)
            of_several = f"{missing:,} steps are missing, the first is step {first:,}"
            yield run.metrics_file.name, of_several if missing > 1 else f"step {first:,} is missing"


def _changed_before(run: RunFolder) -> list[tuple[str, str]]:
    """Return (file name, what was changed) for the ``file_changed`` events of a run, the newest first.

    A resumed run computes new digests, so :func:`changed_since` does not find these changes. A later rewind to before
    a change of metrics.jsonl cancels it: the rewind verifies the lines up to its target, and later lines are new.
    """
    found: list[tuple[int, str, str]] = []  # tokens at which a change was found, file, change
    for event in run.read_events():
        at, file, why, to = (event.get(key) for key in ("tokens", "file", "why", "to_tokens"))
        if event["event"] in RETURNS and isinstance(to, int):
            found = [each for each in found if each[1] != run.metrics_file.name or each[0] <= to]
        if event["event"] == "file_changed" and isinstance(file, str) and isinstance(why, str):
            at = at if isinstance(at, int) else -1
            found.append((at, file, f"{why} (found at {format_quantity(at)} tokens)" if at >= 0 else why))
    return [(file, why) for _, file, why in reversed(found)]


FAULTS = {
    "checkpoint_failed": "the checkpoint at {tokens} tokens is not saved: {why}; the run continues, and older "
    "checkpoints are kept",
    "unwritten": "files cannot be written at {tokens} tokens: {why}; the run continues and writes them later",
    "waits": "the run is done, but its last checkpoint or log lines cannot be written yet: {why}; the run retries, "
    "and Ctrl-C ends it without them",
    "lines_lost": "the last lines of metrics and events are lost: {why}",
    "curves_lost": "{writer} receives no curves after {tokens} tokens: {why}",
    "history_lost": "the step time of this run is not saved, so later plans cannot be corrected by it: {why}",
    "file_changed": "{file} is not as the run wrote it: {why} (found at {tokens} tokens); the run continues",
    "finished_file_changed": "{file} is not as the run wrote it: {why} (found at {tokens} tokens)",
}


def faults_in(event: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fault that an event reports, and for what a rewind changes or skips."""
    if event in FAULTS:
        yield FAULTS[event].format(**{**values, "tokens": format_quantity(values["tokens"])})
    for name in values.get("damaged_checkpoints", ()):
        yield f"checkpoint {name} is damaged and was not used"
    if values.get("changed_values"):
        yield f"the rewind changes values of the recipe: {values['changed_values']}"
    if values.get("skipped_tokens"):
        yield f"the rewind skips {values['skipped_tokens']:,} tokens of the text (whole sequences)"
    if values.get("uneven_validation"):
        yield values["uneven_validation"]
    if values.get("missing_checkpoint"):
        yield f"checkpoint {values['missing_checkpoint']} is missing; the steps up to it are trained again"
