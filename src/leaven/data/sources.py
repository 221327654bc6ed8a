"""Find the files or the data set that a source of a recipe names."""

import os
import sysconfig
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, TypeVar

from leaven import storage
from leaven.data.hub import SCHEME, HubSplit, HubTokens, open_split
from leaven.data.readers import SUFFIXES, BrokenFile, File, missing_shards
from leaven.data.token_files import TOKEN_SUFFIXES, MappedTokens, TokenFile
from leaven.errors import InputError
from leaven.recipe.data import DataSource

# Folders that are not part of python-stdlib. Many distributions ship Python without tests. The modules in encodings
# are tables, which are easy to predict and would be half of the validation text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
_MAGIC = frozenset("*?[")
# Files in the folder of a run or check, with the keys of their first lines.
_KEYS_OF_LEAVEN = {
    "events.jsonl": {"event", "time", "device"},
    "metrics.jsonl": {"step", "tokens", "loss", "grad_norm"},
    "runs.jsonl": {"key", "loss", "flops"},
}
OF_DISKS = {"lost+found", "System Volume Information", "$RECYCLE.BIN"}  # system folders of a disk

SHAKESPEARE = Path(__file__).with_name("shakespeare.jsonl.gz")
"""Shakespeare's plays in 133 documents, 1.1 MB in the public domain. The selection is that of "tinyshakespeare"
(Karpathy 2015, github.com/karpathy/char-rnn)."""

BYTES_PER_TOKEN = 3.75
"""Typical number of bytes of a token, measured on python-stdlib with a BPE of a few thousand tokens (docs/log.md)."""
# Typical bytes of text per byte of a compressed file.
_UNPACKED = {".gz": 3.0, ".zst": 3.0, ".parquet": 2.0}


TextPart = File | HubSplit
TokenPart = TokenFile | HubTokens
"""A file, or a split of a data set."""
AnyFile = TypeVar("AnyFile", File, TokenFile)


class SourceParts(NamedTuple):
    """The parts of a source: files, or one split of a data set. A source has either text or token ids."""

    texts: tuple[TextPart, ...] = ()
    ids: tuple[TokenPart, ...] = ()
    validation: tuple[TokenPart, ...] = ()  # parts of the validation set, which the source's key ``validation`` names
    notes: tuple[str, ...] = ()  # lines about missing files, files that are not read, and links
    lost: tuple[str, ...] = ()  # the notes about missing files and files that are not read


class _NotRead(NamedTuple):
    """Paths that match a source's pattern, but contain nothing to read."""

    empty: dict[Path, None]  # empty folders, in order; a disk that belongs there may not be mounted
    other: dict[Path, None]  # folders and pipes that match the pattern, which is for files

    def notes(self, source: str) -> Iterator[str]:
        if self.empty:
            more = f" and {len(self.empty) - 1:,} more folders are" if len(self.empty) > 1 else " is"
            yield f"{next(iter(self.empty))}{more} empty; if a disk belongs there, mount it, and begin again"
        if self.other:
            many = len(self.other) - 1
            what = f" and {many:,} more match" if many else " matches"
            are = "are not files and are" if many else "is not a file and is"
            yield (
                f"{min(self.other)}{what} data.source {source!r}, but {are} not read; to read the files in a folder, "
                "give a pattern of them"
            )


def source_parts(source: DataSource) -> SourceParts:
    """Return the parts of a source: one split of a data set, or files sorted by key. A source is one of:

    - ``python-stdlib``: the modules of the running Python's standard library, without its tests;
    - ``tiny-shakespeare``: the plays that come with leaven (`SHAKESPEARE`);
    - a path or glob of files with text (:mod:`leaven.data.readers`) or token ids (:mod:`leaven.data.token_files`);
    - ``hf://org/dataset``: see :mod:`leaven.data.hub`.

    The key of a file is its path below the last folder before the first wildcard. For example, the pattern
    ``/a/*/*.txt`` gives the file ``/a/b/c.txt`` the key ``b/c.txt``.

    Raises:
        InputError: if the source does not exist, cannot be read, has files of another format, or mixes text with
            token ids. With ``validation`` set, also if the source or the validation is text.
    """
    found = _parts(source)
    if source.validation is None:
        return found
    if not found.ids:
        raise InputError(f"validation is for token ids, but data.source {source.source!r} is text; remove validation")
    held_out = _parts(source.model_copy(update={"source": source.validation}))
    if not held_out.ids:
        raise InputError(f"validation {source.validation!r} is text, but the source has token ids; give token ids")
    notes, lost = found.notes + held_out.notes, found.lost + held_out.lost
    return found._replace(validation=held_out.ids, notes=notes, lost=lost)


def _parts(source: DataSource) -> SourceParts:
    if source.source.startswith(SCHEME):
        split = open_split(source.source, source.text)
        notes = _lines(split.notes)
        parts = SourceParts(notes=notes, lost=notes)
        return parts._replace(ids=(split,)) if isinstance(split, HubTokens) else parts._replace(texts=(split,))
    not_read = _NotRead({}, {})
    found = _files(source.source, not_read)
    last = storage.expanded(source.source).name  # a name, or a pattern of the names of files
    missing = missing_shards(source.source, [path for _, path in found], last)
    lost = _lines([*not_read.notes(source.source), *missing])
    if found[0][1].suffix in TOKEN_SUFFIXES:
        ids, links = _without_links([TokenFile(key, path, source.dtype) for key, path in found])
        return SourceParts(ids=ids, notes=lost + _about_links(source.source, links, len(found)), lost=lost)
    files = tuple(File(key, path, source.text) for key, path in found)
    if source.source == "python-stdlib":
        return SourceParts(texts=files)
    texts, links = _without_links(files)
    return SourceParts(texts=texts, notes=lost + _about_links(source.source, links, len(found)), lost=lost)


def _about_links(source: str, links: Sequence[tuple[str, str]], count: int) -> tuple[str, ...]:
    """Return a note if some files of a source are left out, because they are links to its other files.

    ``links`` has the keys (link, other file) for each. ``count`` is the number of all files.
    """
    if not links:
        return ()
    link, to = links[0]
    line = (
        f"data.source {source!r}: {len(links):,} of {count:,} files are links to others, which are read once, such "
        f"as {link}, a link to {to}"
    )
    return _lines([line])


def _lines(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(note.encode(errors="replace").decode() for note in notes)  # a file name can be invalid UTF-8


def same_files(files: Sequence[AnyFile]) -> list[list[int]]:
    """Group paths that lead to the same file through links. Return the positions in ``files`` of each group.
    Hard links count as different files, because some tools use them for different documents with equal
    content."""
    candidates: dict[Hashable, list[int]] = {}
    for position, file in enumerate(files):
        candidates.setdefault(file.identity, []).append(position)
    found: dict[Path, list[int]] = {}
    for some in candidates.values():
        if len(some) > 1:  # resolving the paths of all files would be slow
            for position in some:
                found.setdefault(files[position].path.resolve(), []).append(position)
    return [same for same in found.values() if len(same) > 1]


def _without_links(files: Sequence[AnyFile]) -> tuple[tuple[AnyFile, ...], list[tuple[str, str]]]:
    """Return each file once, and a pair (key left out, key kept) for every other path to the same file.

    Without this, links could put a document into both splits, or token ids could be read twice. Of the paths to
    one file, a path with an index (Megatron-LM) is preferred, and among these a path without links. So new links do
    not change the keys of documents.
    """

    def rank(at: int) -> tuple[bool, bool, str]:
        file = files[at]
        return isinstance(file, TokenFile) and file.index is None, _is_behind_link(file), file.key

    links: dict[int, int] = {}
    for same in same_files(files):
        kept = min(same, key=rank)
        links |= {at: kept for at in same if at != kept}
    once = tuple(file for at, file in enumerate(files) if at not in links)
    return once, [(files[at].key, files[links[at]].key) for at in sorted(links)]


def _is_behind_link(file: File | TokenFile) -> bool:
    """Return whether the path ``file.key`` has a link."""
    root = file.path.parents[file.key.count("/")]
    return file.path.resolve() != root.resolve() / file.key


def estimated_tokens(source: DataSource) -> int | None:
    """Return the number of tokens of a source, or None for an hf:// source. Text is estimated from file sizes.
    Raise InputError if the source cannot be used, or if all its text files are empty."""
    if source.source.startswith(SCHEME):
        return None
    parts = source_parts(source)
    if parts.ids:
        return sum(len(opened(part)) for part in parts.ids)
    size = sum(part.size * _UNPACKED.get(Path(part.key).suffix, 1.0) for part in parts.texts)
    if not size:
        raise InputError(f"data.source {source.source!r} is empty; give files that contain text")
    return max(round(size / BYTES_PER_TOKEN), 1)


def text_tokens(sources: Sequence[DataSource]) -> int | None:
    """Return the total number of tokens of ``sources``, an estimate for text. Return None if a source is
    python-stdlib or an hf:// address."""
    if any(source.source == "python-stdlib" for source in sources):
        return None
    sizes = [estimated_tokens(source) for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def opened(part: TokenPart) -> MappedTokens:
    """Return the token ids of a part. Raise InputError if the part cannot be used."""
    try:
        return part.open()
    except BrokenFile as error:
        raise InputError(f"{part.name} {error}".encode(errors="replace").decode()) from None


def _files(source: str, not_read: _NotRead) -> list[tuple[str, Path]]:
    """Return (key, path) of each file of a source, sorted by key. Add skipped paths to ``not_read``."""
    if source == "python-stdlib":
        return _standard_library()
    if source == "tiny-shakespeare":
        return [(SHAKESPEARE.name, SHAKESPEARE)]
    path = storage.expanded(source)
    if os.path.isdir(path):
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            raise InputError(
                f"data.source {source!r} is a folder written by save_to_disk; give hf://{os.path.abspath(path)}"
            )
        raise InputError(
            f"data.source {source!r} is a folder; give a pattern of the files in it, for example '{source}/**/*.txt'"
        )
    if os.path.exists(path):
        found = [(path.name, path)]
    else:
        fixed = next((n for n, part in enumerate(path.parts) if _MAGIC & set(part)), len(path.parts))
        root = Path(*path.parts[:fixed])
        pattern = path.parts[fixed:]
        try:
            paths = set(_matches(root, pattern, not_read)) if pattern and root.is_dir() else set[Path]()
        except OSError as error:
            raise InputError(
                f"data.source {source!r}: {error.filename} cannot be read: {error.strerror}; make it readable, or "
                "give a pattern without it"
            ) from None
        found = sorted((path.relative_to(root).as_posix(), path) for path in paths if not _is_of_leaven(path))
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
    folder: Path, pattern: tuple[str, ...], not_read: _NotRead, above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[Path]:
    """Yield the files below ``folder`` that match ``pattern``, a glob split at slashes, such as ("**", "*.txt").

    Unlike glob, raise InputError for a link without a target, and OSError if a folder cannot be read.

    Args:
        not_read: receives empty folders, and folders and pipes that match.
        above: (device, inode) of the folders that "**" has entered. They are not entered again, so a link to a parent
            folder does no harm.
    """
    name, rest = pattern[0], pattern[1:]
    if _is_empty(folder):
        not_read.empty[folder] = None
    recursive = name == "**"
    while recursive and rest[:1] == ("**",):
        rest = rest[1:]
    if not (recursive or _MAGIC & set(name)):  # no entry is named "..", and a disk may ignore case
        path = folder / name
        _require_target(path)
        if rest and path.is_dir():
            yield from _matches(path, rest, not_read, above)
        elif not rest and path.exists():
            yield from _file(path, path.is_file(), not_read)
        return
    if recursive:
        found = folder.stat()
        if (found.st_dev, found.st_ino) in above:
            return
        above |= {(found.st_dev, found.st_ino)}
        yield from _matches(folder, rest or ("*",), not_read, above)
    with os.scandir(folder) as entries:
        for entry in entries:
            hidden = entry.name.startswith(".") and not name.startswith(".")
            if hidden or entry.name in OF_DISKS or not (recursive or fnmatch(entry.name, name)):
                continue
            path = folder / entry.name
            if not recursive:
                _require_target(path)
            if entry.is_dir() and (rest or recursive):
                yield from _matches(path, pattern if recursive else rest, not_read, above)
            elif not (recursive or rest or (above and entry.is_dir())):
                yield from _file(path, entry.is_file(), not_read)


def _file(path: Path, is_file: bool, not_read: _NotRead) -> Iterator[Path]:
    if is_file:
        yield path
    else:
        not_read.other[path] = None


def _is_of_leaven(path: Path) -> bool:
    """Return whether leaven may have written a file, judged by its name and the keys of its first line."""
    if path.name not in _KEYS_OF_LEAVEN:
        return False
    with suppress(OSError), storage.open_file(path) as file:
        return (storage.json_object(file.readline(2**20)) or {}).keys() >= _KEYS_OF_LEAVEN[path.name]
    return False


def _is_empty(folder: Path) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return all(entry.name in OF_DISKS for entry in entries)
    return False


def _require_target(path: Path) -> None:
    storage.require_target(path, "remove the link, or give a pattern without it in data.source")


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
