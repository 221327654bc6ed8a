"""Open data sets and tokenizers by their hf:// addresses.

``hf://org/name?split=test`` is on the Hugging Face Hub, with options after the question mark. ``hf:///path`` is a
folder on this machine.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from leaven.data.file_tokens import MappedFile
from leaven.data.readers import (
    BrokenFile,
    FileStamp,
    TextRow,
    column_rows,
    file_stamp,
    missing_shards,
    require_text_column,
)
from leaven.data.token_files import MappedTokens, arrow_tokens
from leaven.errors import InputError
from leaven.recipe.units import listed

SCHEME = "hf://"
INPUT_IDS = "input_ids"
MASK = "attention_mask"
"""The columns of Hugging Face tokenizers: the token ids, and the mask that is 0 at padding and 1 elsewhere."""
LABELS = ("labels", "loss_mask", "assistant_masks", "completion_mask")
"""Columns with which other code trains on some of the tokens."""

_DATA_ENDINGS = {".arrow", ".csv", ".jsonl", ".ndjson", ".parquet", ".tsv"}


@dataclass(frozen=True)
class _Split:
    """A split of a data set, used like a :class:`leaven.data.readers.File`."""

    key: str  # name of the split
    name: str  # name of the split in messages
    dataset: Any  # a datasets.Dataset
    column: str  # name of the column with the text or with the token ids
    notes: tuple[str, ...] = ()  # lines about files that are missing or not read

    @property
    def size(self) -> int:
        return self.dataset.dataset_size or 0

    def stamp(self) -> FileStamp | None:
        # The fingerprint in a folder of save_to_disk does not change if a program changes the data files.
        stamp: FileStamp = [self.dataset._fingerprint, len(self.dataset)]
        for file in self.dataset.cache_files:
            of_file = file_stamp(Path(file["filename"]))
            if of_file is None:
                return None
            stamp += of_file
        return stamp


class HubSplit(_Split):
    """A split whose rows are documents of text."""

    def rows(self) -> Iterator[TextRow]:
        require_text_column(self.dataset.features.arrow_schema, self.column)
        return column_rows(self._chunks())

    def _chunks(self) -> Iterator[Any]:
        files = [file for _, some in _mapped_files(self.dataset.data) for file in some]
        for table in self.dataset.select_columns([self.column]).with_format("arrow").iter(batch_size=256):
            for file in files:
                file.require_whole()
            yield from table.column(0).chunks


class HubTokens(_Split):
    """A split whose rows are lists of token ids."""

    def open(self) -> MappedTokens:
        """Return the token ids, mapped into memory. Raise BrokenFile if an id is null, or if there is a column
        "attention_mask" that is not all 1."""
        table = self.dataset.data
        if self.column == INPUT_IDS and MASK in table.column_names and not _all_ones(table):
            raise BrokenFile(
                f"has a column {MASK} with values other than 1, for example at padding; tokenise it again with "
                "padding=False, or remove the column"
            )
        chunks = table.column(self.column).chunks
        starts = np.cumsum([0, *map(len, chunks)])[:-1]  # number of the first row of each chunk
        rows, files = zip(*_mapped_files(table), strict=True)
        blocks = np.searchsorted(np.cumsum(rows), starts, side="right")
        return arrow_tokens(
            chunks, [files[block] if len(chunk) else () for block, chunk in zip(blocks, chunks, strict=True)]
        )


def _all_ones(table: Any) -> bool:
    """Return whether the column "attention_mask" has lists of integers or booleans, all of them 1 and none null."""
    if not _holds_lists(table.schema, MASK, "is_integer", "is_boolean"):
        return False
    masks = [(chunk.null_count, chunk.flatten()) for chunk in table.column(MASK).chunks]
    return not any(
        nulls or mask.null_count or (mask.to_numpy(zero_copy_only=False) == 0).any() for nulls, mask in masks
    )


def _mapped_files(table: Any) -> list[tuple[int, tuple[MappedFile, ...]]]:
    """Return (number of rows, files mapped into memory) for each group of rows that ``datasets`` stores together."""
    found = []
    for blocks in getattr(table, "blocks", [[table]]):  # blocks: different columns of the same rows
        paths = [block.path for block in blocks if hasattr(block, "path")]
        found.append((len(blocks[0]), tuple(MappedFile(path, os.path.getsize(path)) for path in paths)))
    return found


def open_split(source: str, text: str) -> HubSplit | HubTokens:
    """Open one split of a data set. Its rows are documents of text, or lists of token ids.

    Args:
        source: one of these addresses. The default split is ``train``.

            - ``hf://org/name?config=NAME&split=NAME&revision=NAME``: a data set on the Hub;
            - ``hf:///path?config=NAME&split=NAME&revision=NAME``: a folder with files that ``load_dataset`` can read;
            - ``hf:///path?split=NAME``: a folder of several splits, written by ``DatasetDict.save_to_disk``;
            - ``hf:///path``: a folder of one split, written by ``Dataset.save_to_disk``.
        text: name of the column with the text or the token ids. "text" stands for "input_ids" if no column is
            named "text".

    Raise InputError if ``datasets`` is missing, the data set cannot be opened, or the split has no rows.
    """
    place, options = _parse(source, "data.source", {"config", "split", "revision"})
    name = options.get("split", "train")
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"data.source {source!r} needs the package datasets; run: pip install 'leaven[hf]'"
        ) from None
    folder, builder = Path(place), None
    splits = (folder / "dataset_dict.json").exists()
    try:
        if splits or (folder / "state.json").exists():
            for option in options.keys() - ({"split"} if splits else set()):
                raise ValueError(f"{option}= does not apply to a folder written by save_to_disk; remove it")
            if splits:
                names = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
                if name not in names:
                    raise ValueError(f"the data set has no split {name}, only {', '.join(names) or 'others'}")
                folder /= name  # do not open other splits: they may be large or empty
            empty = not json.loads((folder / "state.json").read_bytes())["_data_files"]
            found = None if empty else datasets.load_from_disk(str(folder))
        else:
            builder = datasets.load_dataset_builder(place, options.get("config"), revision=options.get("revision"))
            again = {"download_mode": "reuse_cache_if_exists", "verification_mode": "no_checks"}
            builder.download_and_prepare(**again if _is_outdated(builder) else {})
            found = builder.as_dataset(split=name)
    except Exception as error:  # datasets raises errors of many classes, also of the Hub and of Arrow
        if "corresponds to no data" not in str(error):  # this is the message for a split without rows
            raise _cannot_open(f"data.source {source!r}", error, "files of text") from None
        found = None
    if not found:
        raise InputError(f"the split {name} of data.source {source!r} has no rows; choose another split or data set")
    _require_whole_streams(source, [*_data_files(builder), *(file["filename"] for file in found.cache_files)])
    notes: tuple[str, ...] = ()
    if builder is not None and folder.is_dir():
        files = [Path(file) for file in _data_files(builder, name)]
        notes = (*_left_out(source, folder, builder), *missing_shards(source, files), *_by_line(source, builder))
    if text == "text" and text not in found.column_names and INPUT_IDS in found.column_names:
        text = INPUT_IDS
    if text == INPUT_IDS and (unread := [name for name in found.column_names if name in LABELS]):
        notes = (*notes, f"data.source {source!r}: columns not read: {listed(unread, 'and')}; all tokens are trained")
    # Lists that are all empty have the type null.
    kind = HubTokens if _holds_lists(found.features.arrow_schema, text, "is_integer", "is_null") else HubSplit
    return kind(name, f"{source}:{name}", found, text, notes)


def _data_files(builder: Any, split: str = "all") -> list[str]:
    """Return the data files of ``split``, such as "train[:50%]+test". ``builder`` is None after save_to_disk."""
    chosen = {} if builder is None else builder.config.data_files or {}
    names = [part.partition("[")[0] for part in split.split("+")]
    return [file for name, files in chosen.items() if str(name) in names or "all" in names for file in files]


def _require_whole_streams(source: str, files: Sequence[str]) -> None:
    """Raise InputError if an Arrow file has bytes after the end of its stream. Readers ignore these bytes."""
    import pyarrow

    for path in files:
        if not path.endswith(".arrow") or not os.path.exists(path):
            continue
        with pyarrow.memory_map(path) as file:
            if file.read(6) == b"ARROW1":  # a file with a footer, which readers need
                continue
            file.seek(0)
            for _ in pyarrow.ipc.MessageReader.open_stream(file):
                pass
            spare = file.size() - file.tell()
        if spare:
            raise InputError(
                f"data.source {source!r}: {path} has {spare:,} bytes after the end of its Arrow stream, perhaps "
                "zeros from an interrupted copy; copy or write the file again, or remove the file's folder if it is "
                "in the cache of the package datasets"
            )


def _left_out(source: str, folder: Path, builder: Any) -> Iterator[str]:
    """Yield a note if a folder has data files, or links to other folders, that ``datasets`` does not read.

    There is no note if the folder's README.md chooses the files.
    """
    if len(builder.builder_configs) > 1 or any(isinstance(split, str) for split in builder.config.data_files or {}):
        return
    read, left = {os.path.realpath(file) for file in _data_files(builder)}, []
    endings = _DATA_ENDINGS | {Path(file).suffix for file in read}
    for base, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith((".", "__"))]
        data = [name for name in names if not name.startswith(".") and endings & set(Path(name).suffixes)]
        links = [name for name in inner if Path(base, name).is_symlink()]
        left += [path for name in (*data, *links) if os.path.realpath(path := Path(base, name)) not in read]
    if left:
        yield (
            f"data.source {source!r}: {len(left):,} data files or links to folders are not read, such as {min(left)};"
            " the package datasets chooses files by name and format, and does not follow links to folders; rename or"
            " convert the files, and replace the links by the folders"
        )


def _by_line(source: str, builder: Any) -> Iterator[str]:
    """Yield a note if ``datasets`` makes each line of a text file a document, and drops the line ends."""
    if getattr(builder.config, "sample_by", "") == "line" and not builder.config.keep_linebreaks:
        yield (
            f"data.source {source!r}: the package datasets makes each line of a text file a document, without its "
            "line end; to keep files whole, give the path of the folder without hf://"
        )


def _is_outdated(builder: Any) -> bool:
    """Return whether a local file of ``builder`` may have changed since ``datasets`` cached it.

    ``datasets`` itself compares modification times, which stay old if files come from an archive.
    """
    changed = [os.stat(file).st_ctime_ns for file in _data_files(builder) if os.path.exists(file)]
    copied = Path(builder.cache_dir, "dataset_info.json")
    return copied.exists() and max(changed, default=0) >= copied.stat().st_mtime_ns


def _holds_lists(schema: Any, column: str, *tests: str) -> bool:
    """Return whether a column has lists whose element type passes a test of pyarrow, such as "is_integer"."""
    from pyarrow import types

    kind = schema.field(column).type if column in schema.names else None
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if kind is None or not any(test(kind) for test in lists):
        return False
    return any(getattr(types, test)(kind.value_type) for test in tests)


def fetch_tokenizer(tokenizer: str) -> Path:
    """Return the path of the tokenizer.json of ``hf://org/model?revision=NAME`` or of ``hf:///folder``.

    A file on the Hub is downloaded unless an earlier download exists. Raise InputError if this fails.
    """
    place, options = _parse(tokenizer, "data.tokenizer", {"revision"})
    if Path(place).is_absolute():
        return Path(place) / "tokenizer.json"
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise InputError(
            f"data.tokenizer {tokenizer!r} needs the package huggingface_hub; run: pip install 'leaven[hf]'"
        ) from None
    fetch = partial(hf_hub_download, place, "tokenizer.json", revision=options.get("revision"))
    try:
        with suppress(LocalEntryNotFoundError):
            return Path(fetch(local_files_only=True))
        return Path(fetch())
    except Exception as error:
        raise _cannot_open(f"data.tokenizer {tokenizer!r}", error, "a tokenizer.json") from None


def _parse(uri: str, setting: str, known: set[str]) -> tuple[str, dict[str, str]]:
    parts = urlsplit(uri)
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(given)
    if len(options) < len(given):
        raise InputError(f"{setting} {uri!r} has an option twice; give it once, such as split=train+extra")
    for name in options.keys() - known:
        raise InputError(f"{setting} {uri!r}: {name} is unknown; the options are {', '.join(sorted(known))}")
    place = parts.netloc + parts.path
    if not place.strip("/"):
        raise InputError(f"{setting} {uri!r} has no name; write hf://org/name or hf:///folder")
    return place, options


def _cannot_open(what: str, error: Exception, instead: str) -> InputError:
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, ConnectionError | LocalEntryNotFoundError):
        why, remedy = "the Hub cannot be reached, and there is no earlier download", "connect to the network"
    else:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        remedy = "check the name, the options and your access"
    return InputError(f"{what} cannot be opened: {why}; {remedy}, or give the path of {instead} on this machine")
