"""Find the files or the data set that a source of a recipe names."""

import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from leaven import storage
from leaven.data.hub import SCHEME, HubSplit, HubTokens, open_split
from leaven.data.readers import SUFFIXES, BrokenFile, File, missing_shards
from leaven.data.token_files import TOKEN_SUFFIXES, MappedTokens, TokenFile
from leaven.errors import InputError
from leaven.recipe.data import Data, DataSource

# Folders that are not part of python-stdlib. Many distributions ship Python without tests. The modules in encodings
# are tables, which are easy to predict and would be half of the validation text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_MAGIC = frozenset("*?[")
# Files in the folder of a run or check, with keys of their first lines.
_KEYS_OF_LEAVEN = {
    "events.jsonl": {"event", "step", "tokens", "time"},
    "metrics.jsonl": {"step", "tokens", "loss", "grad_norm"},
    "runs.jsonl": {"key", "loss", "flops"},
}
OF_DISKS = {"lost+found", "System Volume Information", "$RECYCLE.BIN"}  # system folders of a disk

SHAKESPEARE = Path(__file__).with_name("shakespeare.jsonl.gz")
"""The plays of Shakespeare in "tinyshakespeare" (Karpathy 2015, github.com/karpathy/char-rnn): 133 documents, 1.1 MB,
in the public domain."""

BYTES_PER_TOKEN = {256: 1.0, 512: 1.95, 1024: 2.5, 2048: 3.0, 4096: 3.5, 8192: 3.8, 16384: 4.0, 32768: 4.1}
"""Typical number of bytes of a token, by vocabulary size: medians of BPEs trained on Python's standard library,
on its enhancement proposals, and on Shakespeare (docs/log.md)."""
# Typical bytes of text per byte of a compressed file.
_UNPACKED = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}

TextPart = File | HubSplit
TokenPart = TokenFile | HubTokens
"""A file, or a split of a data set."""

_VALIDATION = "for validation"


class SourceParts(NamedTuple):
    """The parts of a source: files, or one split of a data set. A source has either text or token ids."""

    texts: tuple[TextPart, ...] = ()
    ids: tuple[TokenPart, ...] = ()
    validation: tuple[TokenPart, ...] = ()  # parts of the validation set, which the source's key ``validation`` names
    notes: tuple[str, ...] = ()  # lines about missing files and files that are not read


class _NotRead(NamedTuple):
    """Paths that a pattern finds, but that have nothing to read."""

    empty: set[Path]  # empty folders; a disk that belongs there may not be mounted
    other: set[Path]  # folders and pipes whose names match the pattern, which is for files

    def notes(self, source: str) -> Iterator[str]:
        if self.empty:
            first, count = min(self.empty), len(self.empty)
            what = f"{first} is empty" if count == 1 else f"{count:,} folders are empty, such as {first}"
            yield f"data.source {source!r}: {what}; if a disk belongs there, mount it"
        if self.other:
            first, count = min(self.other), len(self.other)
            what = (
                f"{first} is not a file, so it is not read"
                if count == 1
                else f"{count:,} paths, such as {first}, are not files, so they are not read"
            )
            yield (
                f"data.source {source!r}: {what}; to read the files in a folder, give a pattern such as '{first}/*.*'"
            )


def source_parts(source: DataSource) -> SourceParts:
    """Return the parts of a source: one split of a data set, or files sorted by key. A source is one of:

    - ``python-stdlib``: the modules of the running Python's standard library, without its tests;
    - ``tiny-shakespeare``: the plays that come with leaven (`SHAKESPEARE`);
    - a path or glob of files with text (:mod:`leaven.data.readers`) or token ids (:mod:`leaven.data.token_files`);
    - ``hf://org/dataset``: see :mod:`leaven.data.hub`.

    The key of a file is its path below the last folder before the first wildcard. For example, the pattern
    ``/a/*/*.txt`` gives the file ``/a/b/c.txt`` the key ``b/c.txt``.

    Raise InputError if the source does not exist, cannot be read, has files of another format, or mixes text with
    token ids. If ``source.validation`` is set, both sources must have token ids.
    """
    found = _parts(source)
    if source.validation is None:
        return found
    if not found.ids:
        raise InputError(f"validation is for token ids, but data.source {source.source!r} is text; remove validation")
    held_out = _parts(source.model_copy(update={"source": source.validation}))
    if not held_out.ids:
        raise InputError(f"validation {source.validation!r} is text, but the source has token ids; give token ids")
    return found._replace(validation=held_out.ids, notes=found.notes + held_out.notes)


def _parts(source: DataSource) -> SourceParts:
    if source.source.startswith(SCHEME):
        split = open_split(source.source, source.text)
        parts = SourceParts(notes=_lines(split.notes))
        return parts._replace(ids=(split,)) if isinstance(split, HubTokens) else parts._replace(texts=(split,))
    not_read = _NotRead(set(), set())
    found = _files(source.source, not_read)
    last = storage.expanded(source.source).name  # a name, or a pattern of the names of files
    missing = missing_shards(source.source, [path for _, path in found], last)
    notes = _lines([*not_read.notes(source.source), *missing])
    if found[0][1].suffix in TOKEN_SUFFIXES:
        ids = tuple(TokenFile(key, path, source.dtype) for key, path in found)
        without = [file.name for file in ids if file.path.suffix == ".bin" and file.index is None]
        if without and any(file.index for file in ids):
            raise InputError(
                f"data.source {source.source!r}: {without[0]} has no .idx of Megatron-LM, unlike other files; bring "
                "the .idx back, or make two sources: the first with all files that have an .idx, the second with the "
                "others"
            )
        return SourceParts(ids=ids, notes=notes)
    return SourceParts(texts=tuple(File(key, path, source.text) for key, path in found), notes=notes)


def _lines(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(note.encode(errors="replace").decode() for note in notes)  # a file name can be invalid UTF-8


def uses(parts: SourceParts) -> Iterator[tuple[TextPart | TokenPart, str]]:
    """Yield each part of a source, and what it is used for, such as ``"for training"``."""
    for text in parts.texts:
        yield text, "for training and validation"
    for part in parts.ids:
        yield part, "for training" if parts.validation else "a part of it for validation"
    for part in parts.validation:
        yield part, _VALIDATION


def refuse_repeated_files(sources: Mapping[str, SourceParts]) -> None:
    """Raise InputError if a file is found twice, by one source or by two. Its documents could then be used for both
    training and validation.

    Two sources may share a file of token ids if both use it for training, or both for validation. A symbolic link
    counts as the file to which it leads. Hard links count as different files, because some tools use them for
    different documents with equal content.
    """
    found: dict[Path, tuple[Path, str, str]] = {}  # path, source and use of each file
    for source, parts in sources.items():
        own = set()  # files of this source
        for part, use in uses(parts):
            if source == "python-stdlib" or not isinstance(part, File | TokenFile):
                continue
            real = part.path.resolve()
            other, by, use_there = found.setdefault(real, (part.path, source, use))
            if real in own or (by != source and (parts.texts or use != use_there)):
                what = (
                    f"{other} is found twice"
                    if part.path == other
                    else f"{other} and {part.path} are the same file, found twice"
                )
                who = dict.fromkeys(
                    f"{'validation of' if use == _VALIDATION else 'data.source'} {source!r}"
                    for source, use in ((by, use_there), (source, use))
                )
                message = (
                    f"{what}, by {' and '.join(who)}; change the patterns so that each file is found once. For "
                    "example, if the folder latest is a link to v1, write v1/*.jsonl instead of */*.jsonl"
                )
                raise InputError(message.encode(errors="replace").decode())
            own.add(real)


class TextSize(NamedTuple):
    """The size of training text: bytes of text (uncompressed), and token ids."""

    size: float = 0.0
    ids: int = 0

    def tokens(self, vocab_size: int) -> int:
        """Return the number of tokens. For text, estimate it for a typical vocabulary of this size."""
        return max(round(self.size / bytes_per_token(vocab_size)), 1) if self.size else self.ids


def bytes_per_token(vocab_size: int) -> float:
    """Return the typical number of bytes of a token, interpolated over the logarithm of the vocabulary's size."""
    for (small, least), (large, most) in pairwise(BYTES_PER_TOKEN.items()):
        if vocab_size <= large:
            return least + (most - least) * max(math.log(vocab_size / small) / math.log(large / small), 0.0)
    return most


def text_size(source: DataSource) -> TextSize | None:
    """Return the size of a source, or None for an hf:// source. Sizes of compressed files are estimated.
    Raise InputError if the source cannot be used, or if all its text files are empty."""
    if source.source.startswith(SCHEME):
        return None
    parts = source_parts(source)
    if parts.ids:
        return TextSize(ids=sum(len(opened(part)) for part in parts.ids))
    size = sum(part.size * _UNPACKED.get(Path(part.key).suffix, 1.0) for part in parts.texts)
    if not size:
        raise InputError(f"data.source {source.source!r} is empty; give files that contain text")
    return TextSize(size)


def text_tokens(data: Data, vocab_size: int) -> int | None:
    """Return the number of training tokens of one epoch, averaged over samples, an estimate for text. Return None if
    a source is python-stdlib or an hf:// address."""
    if any(source.source == "python-stdlib" for source in data.sources):
        return None
    sizes = [text_size(source) for source in data.sources]
    # A source of n tokens and the share s is read s T / n times in T tokens, and s of the samples come from it.
    epochs = [share**2 / size.tokens(vocab_size) for size, share in zip(sizes, data.proportions, strict=True) if size]
    return round(1 / sum(epochs)) if len(epochs) == len(sizes) else None


def opened(part: TokenPart) -> MappedTokens:
    """Return the token ids of a part. Raise InputError if the part cannot be used."""
    try:
        return part.open()
    except BrokenFile as error:
        raise InputError(f"{part.name} {error}".encode(errors="replace").decode()) from None


def _files(source: str, not_read: _NotRead) -> list[tuple[str, Path]]:
    """Return (key, path) of each file of a source, sorted by key. Add what has nothing to read to ``not_read``."""
    if source == "python-stdlib":
        return _standard_library()
    if source == "tiny-shakespeare":
        return [(SHAKESPEARE.name, SHAKESPEARE)]
    path = storage.expanded(source)
    if os.path.isdir(path):
        raise InputError(
            f"data.source {source!r} is a folder; give a pattern of the files in it, for example '{source}/**/*.txt',"
            f" or hf://{os.path.abspath(path)} for a data set that save_to_disk wrote"
        )
    if os.path.exists(path):
        found = [(path.name, path)]
    else:
        fixed = next((n for n, part in enumerate(path.parts) if _MAGIC & set(part)), len(path.parts))
        root = Path(*path.parts[:fixed])
        pattern = path.parts[fixed:]
        if part := next((part for part in pattern if "**" in part and part != "**"), None):
            inside = f"**/{re.sub('[*]+', '*', part)}"
            raise InputError(
                f"data.source {source!r}: {part} does not search subfolders; write {inside} to search subfolders, "
                f"too, or {inside[3:]} to search none"
            )
        try:
            paths = set(_matches(root, pattern, not_read)) if pattern and root.is_dir() else set[Path]()
        except OSError as error:
            raise InputError(
                f"data.source {source!r}: {error.filename} cannot be read: {error.strerror}; make it readable, or "
                "give a pattern that leaves it out"
            ) from None
        found = sorted((path.relative_to(root).as_posix(), path) for path in paths if not _is_of_leaven(path))
    if not found and not_read.other:
        first = min(not_read.other)
        raise InputError(
            f"data.source {source!r} matches {first}, which is not a file; to read the files in a folder, give a "
            f"pattern such as '{first}/*.*'"
        )
    if not found:
        raise InputError(
            f"data.source {source!r} matches no file; give python-stdlib, tiny-shakespeare, hf://org/dataset, or a "
            f"path or glob of files with text ({', '.join(SUFFIXES)}) or token ids ({', '.join(TOKEN_SUFFIXES)}); a "
            "relative path starts in the current folder"
        )
    for _, file in found:
        if not file.name.endswith(SUFFIXES + TOKEN_SUFFIXES):
            suffixes = f"{', '.join(SUFFIXES)} file (text) or a {', '.join(TOKEN_SUFFIXES)} file (token ids)"
            raise InputError(f"{file} is not a {suffixes}; convert it or exclude it from data.source")
    ids = [file for _, file in found if file.name.endswith(TOKEN_SUFFIXES)]
    if 0 < len(ids) < len(found):
        raise InputError(f"data.source {source!r} matches text and token ids ({ids[0]}); give them as two sources")
    return found


def _matches(
    folder: Path, pattern: Sequence[str], not_read: _NotRead, above: frozenset[Path] = frozenset()
) -> Iterator[Path]:
    """Yield the files below ``folder`` that match ``pattern``, a glob split at slashes, such as ("**", "*.txt").

    Unlike glob, raise OSError if a folder cannot be read, and InputError if a link has no target.

    Args:
        not_read: receives empty folders, matching pipes and, if the pattern has no "**", matching folders.
        above: folders that "**" has entered. They are not entered again, so a link to a parent folder does no harm.
    """
    name, rest = pattern[0], pattern[1:]
    recursive = name == "**"
    while recursive and rest[:1] == ("**",):
        rest = rest[1:]
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name not in OF_DISKS]
    if not names:
        not_read.empty.add(folder)
    if recursive:
        if (real := folder.resolve()) in above:
            return
        above |= {real}
        yield from _matches(folder, rest or ("*",), not_read, above)
        names = [found for found in names if not found.startswith(".")]
    elif _MAGIC & set(name):
        names = [found for found in names if fnmatch(found, name) and not (found[0] == "." != name[0])]
    else:  # scandir does not list "..", and a disk may ignore the case of names
        names = [name]
    for path in (folder / found for found in names):
        if not recursive:
            storage.require_target(path, "remove the link, or give a pattern in data.source that leaves it out")
        if recursive or rest:
            if path.is_dir():
                yield from _matches(path, pattern if recursive else rest, not_read, above)
        elif path.is_file():
            yield path
        elif path.exists() and not (above and path.is_dir()):
            not_read.other.add(path)


def _is_of_leaven(path: Path) -> bool:
    """Return whether leaven may have written a file, by its name and the keys of its first line."""
    if path.name not in _KEYS_OF_LEAVEN:
        return False
    with suppress(OSError), storage.open_file(path) as file:
        return (storage.json_object(file.readline(2**20)) or {}).keys() >= _KEYS_OF_LEAVEN[path.name]
    return False


def _standard_library() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    if not found:
        raise InputError(
            f"this Python has no source code of its standard library in {root}; set data.source to the path of a text"
        )
    return sorted(found)
