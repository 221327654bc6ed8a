"""Read the losses that a command reports: in text, JSON lines, TensorBoard event files, or an offline run of W&B.

While the command still writes a file, an incomplete last line or record is ignored.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.errors import InputError
from leaven.training.outcome import Curve
from leaven.training.run_logs import (
    EVENTS,
    OF_HPARAMS,
    EventFile,
    LogDamaged,
    is_only_result,
    read_event_files,
    wandb_rows,
)
from leaven.tuning.command import LossSource

Losses = Iterator[tuple[int | None, float]]  # (step, loss) in the order in which they were written
Row = tuple[Any, dict[str, Any]]  # (step, values by name)
MOST_NAMES = 20  # names of values that a message lists
LARGEST_STEP = 2**63 - 1  # the largest step that a log may report
# A text before or after a loss that makes it a part of a longer number, such as 12. before 5.
_NUMBER_BEFORE = re.compile(r"\d\.?(?:[eE][-+]?)?\Z")
_NUMBER_AFTER = re.compile(r"['.]?\d")
_LIKE_NUMBER = re.compile(r"[-+]?(?:\.?\d|(?:nan|inf)(?![a-z]))", re.IGNORECASE)  # the beginning of a number


def read_losses(source: LossSource, where: Path, *, complete: bool, resumed: bool = False) -> Curve:
    """Return the (step, loss) pairs that a command has reported, in the order in which they were written.

    Without logged steps, the step of the n-th loss is n. Steps are multiplied by ``source.tokens_per_step``,
    if given. If a step has several losses, its first NaN or infinite loss counts, or else its last loss.

    Args:
        where: the file or folder with the losses.
        complete: whether the command has ended. Until then, a missing or damaged file gives ().
        resumed: whether a folder may have files of several attempts. Such files are sorted by their last steps.

    Raises:
        InputError: if a loss or step is not a number. With ``complete``, also if the file or the last loss cannot be
            read.
        OSError: if ``complete`` and the disk of the file is unreachable (``storage.AWAY``).
    """
    times, curve = source.tokens_per_step or 1, dict[int, float]()
    try:
        for number, (step, loss) in enumerate(_losses(source, where, complete, resumed), 1):
            at = times * (number if step is None else step)
            before = curve.pop(at, loss)  # removed, so that the step moves to the end of the dict
            curve[at] = loss if math.isfinite(before) else before
    except (OSError, LogDamaged) as error:
        if not complete:  # another machine may see a part of the file before the rest
            return ()
        if isinstance(error, LogDamaged) or error.errno in storage.AWAY:
            raise
        why = f"{error.strerror}; correct the path of the losses in the command file, or make this path readable"
        raise InputError(f"{where}: {why}") from None
    return tuple(curve.items())


def written_losses(source: LossSource, where: Path) -> list[tuple[int | None, float]]:
    """Return all (step, loss) pairs in a log, up to the first unreadable one. A missing step is None."""
    found = list[tuple[int | None, float]]()
    with suppress(OSError, InputError):
        found.extend(_losses(source, where, True, True))
    return found


def why_none(source: LossSource, where: Path) -> str:
    """Return why a command reported no loss, for example a wrong ``source.key``."""
    if source.key is None:
        return "reported no loss"
    if source.tensorboard is not None:
        keys = {tag for file in read_event_files(where.rglob(f"*{EVENTS}*"), source.key) for tag in file.tags}
        if is_only_result(where, source.key):
            return f"reported no loss: {source.key} is only {OF_HPARAMS}"
    else:
        keys = {key for _, row in _rows(source, where) for key in row}
    names = ", ".join(sorted(keys)[:MOST_NAMES])
    return f"reported no loss: loss.key = {source.key!r} is none of {names}" if names else "reported no loss"


def _losses(source: LossSource, where: Path, complete: bool, resumed: bool) -> Losses:
    if source.pattern is not None:
        return _of_text(source, where, complete)
    return _of_rows(source, where, complete, resumed)


def _of_text(source: LossSource, file: Path, complete: bool) -> Losses:
    text = storage.read(file).decode(errors="replace").replace("\r", "\n") if file.is_file() else ""
    broken, unread, diverged = None, None, False
    for found in re.finditer(source.expression, text if complete else text[: text.rfind("\n") + 1], re.MULTILINE):
        # The pattern may have an alternative without a loss, or match an empty text.
        if found["loss"] is None or not found[0].strip():
            continue
        step = re.sub("[,_]", "", found.groupdict().get("step") or "")
        if len(step) > len(str(LARGEST_STEP)):
            raise InputError(f"{file}: a loss has the step {step:.60}, which is too large")
        if (loss := _number(found)) is None:
            unread = found
            broken = broken or (found if _LIKE_NUMBER.match(found["loss"]) else None)
            continue
        unread, diverged = None, diverged or not math.isfinite(loss)
        yield int(step) if step else None, loss
    if complete and not diverged and (wrong := broken or unread) is not None:
        line = text[text.rfind("\n", 0, wrong.start("loss")) + 1 :].partition("\n")[0].strip()
        raise InputError(
            f"{file}: {'the last' if wrong is unread else 'a'} loss is {wrong['loss'][:60] or 'empty'}, which is not "
            f"a complete number, in the line {line[:200]!r}; let the command print losses as 1234.5 or nan; if this "
            "is not a loss, write into loss.pattern the text directly before a loss (not .*) and directly after it, "
            "as in {loss}nats"
        )


def _number(found: re.Match[str]) -> float | None:
    """Return the loss in a match (tqdm prints nan.0 for nan), or None if it is not a complete number: 5 of 12.5."""
    log, (start, end), text = found.string, found.span("loss"), found["loss"].rstrip(".")
    cut = _NUMBER_BEFORE.search(log, max(0, start - 4), start) or _NUMBER_AFTER.match(log, end)
    if cut or "_" in text or (text.lstrip("+-").isdecimal() and re.match(r",\d", log[end : end + 2])):
        return None
    try:
        return float(re.sub(r"(?i)(?<=nan|inf)\.0*$", "", text))
    except ValueError:
        return None


def _of_rows(source: LossSource, where: Path, complete: bool, resumed: bool) -> Losses:
    key = str(source.key)
    if complete and source.jsonl is not None:
        _require_last_line(source, where)
    rows = [(step, row) for step, row in _rows(source, where, complete, resumed) if key in row]
    diverged = False
    for step, row in rows:
        if (loss := row[key]) is None:  # loggers write null for a value that a step does not have
            continue
        has_step = type(step) in {int, float} and abs(step) <= LARGEST_STEP  # false for true and NaN
        if not has_step and (source.step is not None or step is not None):
            suggestion = "correct what the command logs"
            if source.step is not None:
                suggestion = f"set loss.step to another key of this line: {', '.join(list(row)[:MOST_NAMES])}"
            raise InputError(
                f"{where}: in a line with {key}, the step ({source.step or '_step'}) is {step!r:.60}, not a "
                f"valid number; {suggestion}"
            )
        try:
            if isinstance(loss, bool) or "_" in str(loss):  # float() reads both
                raise ValueError
            number = float(loss)
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{where}: {key} is {loss!r:.60}, not a number; set loss.key to the key of the loss"
            ) from None
        diverged = diverged or not math.isfinite(number)
        yield step if step is None else int(step), number
    if complete and not diverged and rows and rows[-1][1][key] is None:
        raise InputError(
            f"{where}: the last {key} is null, which may mean NaN; change the command so that it writes a NaN loss "
            f"as NaN, and leaves {key} out of lines without a loss"
        )


def _require_last_line(source: LossSource, where: Path) -> None:
    """Raise InputError if a damaged line follows the last loss, because it may contain a later loss."""
    for line in reversed(storage.read(where, math.inf).splitlines() if where.exists() else []):
        row = storage.json_object(line)
        if row is None and (line.lstrip().startswith((b"{", b"\0")) or line.rstrip().endswith(b"}")):
            raise InputError(
                f"{where}: the last loss may be in a damaged line: {line.decode(errors='replace')[:60]!r}; let the "
                "command write each loss as one whole line of JSON"
            )
        if row is not None and row.get(str(source.key)) is not None:
            return


def _rows(source: LossSource, where: Path, complete: bool = False, resumed: bool = False) -> Iterator[Row]:
    """Yield (step, values by name) for each logged row at ``where``. For TensorBoard, the only value is the loss.

    TensorBoard folders are read in order of the time of their first loss. The event files in a folder, and the files
    of W&B, are read in order of the start times in their paths or, with ``resumed``, of their last steps.
    """
    if source.jsonl is not None:
        read = (str(source.key), str(source.step))
        lines = storage.read_json_lines(where, lambda line: storage.foreign_json(line, read))
        return ((line.get(source.step or ""), line) for line in lines.documents)
    found: list[list[list[Row]]]  # by folder and file
    if source.tensorboard is not None:
        key = str(source.key)
        folders = _event_folders(source, where, complete)
        found = [[[(step, {key: value}) for step, value in file.points] for file in files] for files in folders]
    else:
        logs = sorted(where.rglob("*.wandb"), key=lambda file: (file.parent.name, file))
        found = [[list(wandb_rows(file)) for file in logs]]
    # The times are by the clock of a machine. Attempts may run on several machines, whose clocks may differ.
    return (row for files in found for rows in (sorted(files, key=_last_step) if resumed else files) for row in rows)


def _event_folders(source: LossSource, where: Path, complete: bool) -> list[list[EventFile]]:
    """Return the TensorBoard event files with losses, one list per folder, in order of the folders' first losses.
    With ``complete``, raise InputError if the folders are not successive attempts of one run, which do not overlap in
    time and end with the highest step."""
    folders = dict[Path, list[EventFile]]()
    for file in read_event_files(where.rglob(f"*{EVENTS}*"), str(source.key)):
        if file.points:
            folders.setdefault(file.path.parent, []).append(file)
    found = sorted(folders.items(), key=lambda each: min(min(file.times) for file in each[1]))
    curves = [
        (
            sorted(time for file in files for time in file.times),
            sorted(step for file in files for step, _ in file.points),
        )
        for _, files in found
        if not files[0].of_hparams  # each result of ``add_hparams`` has a folder of its own
    ]
    at_once = any(later[0] <= times[-1] for (times, _), (later, _) in pairwise(curves))
    reached = [(steps[-1], steps[0]) for _, steps in curves]
    if complete and (at_once or (len(reached) > 1 and reached[-1] <= max(reached[:-1]))):
        names = " and ".join(sorted(map(str, folders)))
        raise InputError(
            f"{names} each have a curve {source.key}, and it is unclear which is the trial's loss; "
            "let the command log the trial's loss under a name that no other curve has, or in one fixed log folder "
            "under {out}, and set loss.tensorboard to this folder"
        )
    return [files for _, files in found]


def _last_step(rows: list[Row]) -> float:
    return max((step for step, _ in rows if isinstance(step, int | float)), default=-math.inf)
