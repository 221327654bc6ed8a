"""Read the losses that a command reports: in text, JSON lines, TensorBoard event files, or an offline run of W&B.

While the command still writes a file, an incomplete last line or record is ignored.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from leaven import storage
from leaven.errors import InputError
from leaven.training.outcome import Curve
from leaven.training.run_logs import (
    OF_NAN,
    LogDamaged,
    by_event_name,
    is_another_loss,
    superseded_events,
    tensorboard_events,
    tensorboard_rows,
    wandb_rows,
)
from leaven.tuning.command import LossSource

Losses = Iterator[tuple[int | None, float]]  # (step, loss) in the order in which they were written
Row = tuple[Any, dict[str, Any]]  # (step, values by name)
_Point = tuple[float, int]  # (time, step) of a loss
MOST_NAMES = 20  # names of values that a message lists
MOST_BEFORE = 1000  # characters before a loss, and after it, on its line that are compared
LARGEST_STEP = 2**63 - 1  # the largest step that a log may report
_LIKE_NUMBER = re.compile(r"[^\w,;|]*\d|\*\*")  # a text that begins like a number, perhaps after quotes
# What may be printed in place of a lost loss: nothing, signs, a text in brackets or quotes, or one of these words.
_NO_NUMBER = re.compile(r"\W*(?:$|[,;|\['\"]|(?i:none|null|nan|n/?a|err|error|overflow|inf|infinity)\b)")
_ANY_NUMBER = re.compile(r"[-+]?(?:\.?\d(?:[\d.,_]*\d)?(?:e[-+]?\d+)?|\b(?:nan|inf)\b)", re.IGNORECASE)


def read_losses(source: LossSource, where: Path, *, complete: bool, resumed: bool = False) -> Curve:
    """Return the (step, loss) pairs that a command has reported, in the order in which they were written.

    Without logged steps, the step of the n-th loss is n. Steps are multiplied by ``source.tokens_per_step``,
    if given. If a step has several losses, its first NaN or infinite loss counts, or else its last loss.

    Args:
        where: the file or folder with the losses.
        complete: whether the command has ended. Until then, a missing or damaged file gives ().
        resumed: whether a folder may have files of several attempts. Such files are sorted by their last steps.

    Raises:
        InputError: if a loss or step is not a number, or if ``complete`` and the file cannot be read.
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
        why = f"{error.strerror}; correct this, or the path of the losses in the command file"
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
    keys = set[str]() if source.key is None else {key for _, row in _rows(source, where) for key in row}
    if source.key in keys:
        return f"reported no loss: every {source.key} in {where} is null"
    names = ", ".join(sorted(keys)[:MOST_NAMES])
    return f"reported no loss: loss.key = {source.key!r} is none of {names}" if names else "reported no loss"


def _losses(source: LossSource, where: Path, complete: bool, resumed: bool) -> Losses:
    if source.pattern is not None:
        return _of_text(source, where, complete)
    return _of_rows(source, where, complete, resumed)


def _of_text(source: LossSource, file: Path, complete: bool) -> Losses:
    text = storage.read(file).decode(errors="replace").replace("\r", "\n") if file.is_file() else ""
    losses = list[re.Match[str]]()
    for found in re.finditer(source.expression, text if complete else text[: text.rfind("\n") + 1], re.MULTILINE):
        step = re.sub("[,_]", "", found.groupdict().get("step") or "")
        if len(step) > len(str(LARGEST_STEP)):
            raise InputError(f"{file}: a loss has the step {step:.60}, which is too large")
        if found["loss"] is not None:  # the pattern may have an alternative without a loss
            if complete:
                losses.append(found)
            yield int(step) if step else None, float(found["loss"])
    if not complete or not all(math.isfinite(float(loss["loss"])) for loss in losses):  # it runs, or has diverged
        return
    if (padded := _padded(source, text, losses)) is not None:
        raise InputError(
            f"{file}: the last loss may be {padded:.60}, with spaces around it or its step that loss.pattern does "
            "not allow; if it is a loss, write ' *' before and after {loss} and {step} in loss.pattern"
        )
    if (unreadable := _unreadable(source, text, losses)) is not None:
        shown = unreadable[:60].rstrip(",;|") or "empty"
        raise InputError(
            f"{file}: the last loss may be {shown}, which is not a number; if it is a loss, print it as 1234.5 or "
            "nan; if the step has no loss, do not print this line"
        )


def _unreadable(source: LossSource, text: str, losses: list[re.Match[str]]) -> str | None:
    """Return a text that stands where a loss is expected, after the last of ``losses``, or None.

    Only lines that begin like the line of the last loss count, unlike "*** loss *** done". A text such as "None"
    may mean that a step has no loss. It counts only if there are several losses, and if more than twice as many such
    texts follow the last loss as stand in any gap before it.
    """
    last = losses[-1] if losses else None
    for found in re.compile(source.unreadable, re.MULTILINE).finditer(text, last.end() if last else 0):
        same = last is None or _before(text, last.start()) == _before(text, found.start())
        if same and found["loss"] is not None:
            return found["loss"]
    if last is None:
        return None
    texts = _texts(source, last, last.end(), len(text))
    if numbers := [each for each in texts if _LIKE_NUMBER.match(each)]:
        return numbers[0]
    after = [each for each in texts if _NO_NUMBER.match(each)]
    if not after or len(losses) == 1:
        return None
    parts = ((one.end() if one else 0, other.start()) for one, other in pairwise([None, *losses]) if other)
    rarer = any(2 * len(_texts(source, last, *part)) >= len(after) for part in parts)
    return None if rarer else after[-1]


def _padded(source: LossSource, text: str, losses: list[re.Match[str]]) -> str | None:
    """Return a number after the last of ``losses`` that is one of them but for spaces around it or its step, or None.

    Its line resembles that of the last loss: numbers and spaces aside, the text before it is the same, and the next
    word if there is one. With its spaces, the number is as wide as one of ``losses``, unlike the 5 of "loss 5 of 10".
    """
    if not losses:
        return None
    last, widths = losses[-1], {_width(loss) for loss in losses}
    begin, word = _before(text, last.start("loss")), _after(last)
    for found in re.compile(source.padded, re.MULTILINE).finditer(text, last.end()):
        resembles = found["loss"] is not None and _after(found) in {"", word} and _width(found) in widths
        if resembles and _before(text, found.start("loss")) == begin:
            return found["loss"]
    return None


def _width(loss: re.Match[str]) -> int:
    """Return the number of characters of a loss and the spaces around it."""
    before = loss.string[max(0, loss.start("loss") - MOST_BEFORE) : loss.start("loss")]
    after = loss.string[loss.end("loss") : loss.end("loss") + MOST_BEFORE]
    return len(loss["loss"]) + len(before) - len(before.rstrip(" ")) + len(after) - len(after.lstrip(" "))


def _texts(source: LossSource, last: re.Match[str], start: int, end: int) -> list[str]:
    """Return the texts, numbers or not, at the place of the loss in ``last.string[start:end]``, a part of a log.

    ``last`` is the match of the last loss. Only lines that resemble its line count: the text before the loss is the
    same apart from numbers and spaces, and after the loss the line ends or has the same next word. So "val loss
    improved from 2.5" does not resemble "val loss 2.5". If only numbers stand before the last loss, return [].
    """
    text, begin, word = last.string, _before(last.string, last.start("loss")), _after(last)
    every = re.compile(source.any_text, re.MULTILINE).finditer(text, start, end) if begin.strip("0") else ()
    return [
        found["loss"]
        for found in every
        if found["loss"] is not None and _after(found) in {"", word} and _before(text, found.start("loss")) == begin
    ]


def _before(text: str, place: int) -> str:
    """Return up to ``MOST_BEFORE`` characters before index ``place``, on the same line of ``text``.

    Each number becomes 0, and white space is removed.
    """
    line = text[max(0, place - MOST_BEFORE) : place].rpartition("\n")[2]
    return re.sub(r"\s", "", _ANY_NUMBER.sub("0", line))


def _after(loss: re.Match[str]) -> str:
    """Return the next word on the line of a loss, "0" if a digit comes first, or "" if neither follows."""
    line = loss.string[loss.end("loss") : loss.end("loss") + MOST_BEFORE].partition("\n")[0]
    found = re.search(r"\d|[^\W\d]+", line)
    return "" if found is None else re.sub(r"\d", "0", found[0])


def _of_rows(source: LossSource, where: Path, complete: bool, resumed: bool) -> Losses:
    if complete and source.jsonl is not None:
        _require_last_line(source, where)
    if complete and source.tensorboard is not None:
        _require_one_curve(source, where, resumed)
    rows = [(step, row) for step, row in _rows(source, where, resumed) if str(source.key) in row]
    for step, row in _nan_for_null(rows, source, where) if complete else rows:
        if (loss := row[str(source.key)]) is None:  # loggers write null for a value that a step does not have
            continue
        has_step = isinstance(step, int | float) and abs(step) <= LARGEST_STEP  # false for NaN
        if not has_step and (source.step is not None or step is not None):
            suggestion = "correct what the command logs"
            if source.step is not None:
                suggestion = f"set loss.step to another key of this line: {', '.join(list(row)[:MOST_NAMES])}"
            raise InputError(
                f"{where}: a line with {source.key} has the step {source.step or '_step'} = {step!r:.60}, not a "
                f"number; {suggestion}"
            )
        try:
            yield step if step is None else int(step), float(loss)
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{where}: {source.key} is {loss!r:.60}, not a number; set loss.key to the key of the loss"
            ) from None


def _nan_for_null(rows: list[Row], source: LossSource, where: Path) -> Iterator[Row]:
    """Yield the rows up to the last loss. If later nulls mean NaN, also yield their rows, with NaN as the loss.

    Many loggers write null for NaN, but null may also mean a step without a loss. Nulls after the last loss mean NaN
    if they outnumber those in each earlier gap between losses by two or more. If by one, raise InputError. Rows that
    look like a summary or an evaluation do not count. If the last counted row has another finite loss, null means no
    loss.
    """
    key = str(source.key)
    losses = [at for at, (_, row) in enumerate(rows) if row[key] is not None]
    if not losses:
        return
    yield from rows[: losses[-1] + 1]
    (last, _), *after = rows[losses[-1] :]
    known = {name for at in losses for name, value in rows[at][1].items() if value is not None}
    nulls = [
        (step, row)
        for step, row in after
        if (last is None or (step is not None and step != last))
        and all(value is None or name in known or OF_NAN.search(name) for name, value in row.items())
    ]
    more = len(nulls) - max(end - start - 1 for start, end in pairwise([-1, *losses]))
    if more <= 0 or any(is_another_loss(name, value) for name, value in nulls[-1][1].items()):
        return
    if more == 1:
        raise InputError(
            f"{where}: {key} is null after its last loss, and null may mean NaN or no loss; write NaN for NaN, and "
            f"leave {key} out of lines without a loss"
        )
    yield from ((step, row | {key: math.nan}) for step, row in nulls)


def _require_last_line(source: LossSource, where: Path) -> None:
    """Raise InputError if a damaged line follows the last loss, because it may contain a later loss."""
    for line in reversed(storage.read(where, math.inf).splitlines() if where.exists() else []):
        row = storage.json_object(line)
        if row is None and line.lstrip().startswith((b"{", b"\0")):
            raise InputError(
                f"{where}: the last loss may be in a damaged line: {line.decode(errors='replace')[:60]!r}; let the "
                "command write each loss as one whole line of JSON"
            )
        if row is not None and row.get(str(source.key)) is not None:
            return


def _rows(source: LossSource, where: Path, resumed: bool = False) -> Iterator[Row]:
    """Yield (step, values by name) for each logged row of the files at ``where``.

    Files of TensorBoard and W&B are read in order of the start times that their paths contain. With ``resumed``,
    they are read in order of their last steps, because the machines that resumed the trial may have different clocks.
    """
    if source.jsonl is not None:
        return ((line.get(source.step or ""), line) for line in storage.read_json_lines(where).documents)
    if source.tensorboard is not None:
        found = [list(tensorboard_rows(file, str(source.key))) for file in _event_files(source, where)]
    else:
        files = sorted(where.rglob("*.wandb"), key=lambda file: (file.parent.name, file))
        found = [list(wandb_rows(file)) for file in files]
    # The times are by the clock of a machine. Attempts may run on several machines, whose clocks may differ.
    return (row for rows in (sorted(found, key=_last_step) if resumed else found) for row in rows)


def _event_files(source: LossSource, where: Path) -> list[Path]:
    """Return the event files below a folder in the order of their names (:func:`by_event_name`).

    Files of ``add_hparams`` are left out, because a result or placeholder in them is no point of the loss curve.
    """
    files = list(where.rglob("*tfevents*"))
    return sorted(set(files) - superseded_events(files, str(source.key)), key=by_event_name)


def _require_one_curve(source: LossSource, where: Path, resumed: bool) -> None:
    """Raise InputError if files in two folders have losses that were written at the same time.

    Such folders are those of a training and a validation loss with the same name. The losses of stages and of
    attempts are written one after the other.
    """
    curves = list[tuple[Path, list[_Point]]]()
    for file in _event_files(source, where):
        events = tensorboard_events(file, str(source.key))
        if points := [(time, step) for time, step, row in events if row.get(str(source.key)) is not None]:
            curves.append((file.parent, points))
    for (one, points), (other, more) in combinations(curves, 2):
        if one != other and _at_once(points, more, resumed):
            names = sorted(str(folder.relative_to(where)) for folder in (one, other))
            shown = " and ".join(str(source.tensorboard) if name == "." else name for name in names)
            # A name with a number, such as a time, may differ in each trial. "." contains the other folder, too.
            paths = [f'"{source.tensorboard}/{name}"' for name in names if not re.search(r"^\.$|\d", name)]
            ways = [f"set loss.tensorboard to the folder of one, {' or '.join(paths)}"] if paths else []
            if len(paths) < len(names):
                ways.append("let the command log the loss that counts under another name, and set loss.key to it")
            raise InputError(
                f"{where} has two curves of {source.key} that were written at the same time, in the folders "
                f"{shown}; {', or '.join(ways)}"
            )


def _at_once(one: list[_Point], other: list[_Point], resumed: bool) -> bool:
    """Return whether two files with losses were written at the same time, not one after the other.

    This is so if their steps overlap by more than a point, and if all points, sorted by time, are also sorted by
    step. It is also so if at least half of the shorter file, or its only point, was written between the first and
    last point of the other. The latter does not count if the files may be of several attempts (``resumed``): the
    clocks of their machines may differ.
    """
    if not one[-1][0] or not other[-1][0]:  # without times, nothing is known
        return False
    (start, end), (begin, last) = sorted((min(points)[0], max(points)[0]) for points in (one, other))
    together = min(end, last) - begin
    overlap = together > 0 or start < begin == last < end
    if not resumed and overlap and 2 * together >= min(end - start, last - begin):
        return True
    (_, end_step), (low, _) = sorted((min(steps), max(steps)) for steps in (_steps(one), _steps(other)))
    steps = _steps(sorted([*one, *other]))
    return low < end_step and steps == sorted(steps)


def _steps(points: list[_Point]) -> list[int]:
    return [step for _, step in points]


def _last_step(rows: list[Row]) -> float:
    return max((step for step, _ in rows if isinstance(step, int | float)), default=-math.inf)
