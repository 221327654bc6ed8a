"""Read token ids from a user's files without copying them, and hold out some of them for validation.

Before the first run, all ids are read, to check them and to compute checksums. The results are cached until a file
changes. A part of a source is one file, or one split of a Hugging Face data set.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven import storage
from leaven.data.corpus import VALIDATION_SHARE, Meter, OnProgress, cached_surveys, surveys_file
from leaven.data.file_tokens import ArrayTokens, BlockChecksums, FileTokens, checksums_fit, checksums_size
from leaven.data.shards import ShardedTokens, Shards
from leaven.data.sources import SourceParts, TokenPart, opened, uses
from leaven.data.stream import Tokens
from leaven.data.token_files import MappedTokens
from leaven.errors import InputError
from leaven.recipe.data import DataSource

FORMAT = 1
"""Version of the fingerprints and of the cached :class:`TokenSurvey` objects."""

STRETCHES = 64
STRETCH_TOKENS = 2**20
"""A file has at most `STRETCHES` stretches of at least about `STRETCH_TOKENS` tokens. The end of each stretch is held
out. So validation covers the whole file, even if the file is sorted."""

LONGEST_END = 2**10
"""A note reports files that end with more than this many equal ids (other than end-of-text). Perhaps the program that
wrote the file was stopped early. The ids may also be padding, so the file is not refused."""

_BLOCK = 2**20  # ids that are read at once


@dataclass(frozen=True)
class TokenSurvey:
    """Facts about all token ids in a file, or in a split of a data set."""

    digest: str  # hash of the ids, their dtype and the ends of documents
    lowest: int  # smallest id if it is negative, else 0
    highest: int  # largest id
    ends: int  # how often the end-of-text token occurs; 0 if its id is unknown
    blocks: str  # the checksums of the blocks of each array of ids, one after the other


class DocumentTokens:
    """The tokens of documents, with an end-of-text token added after each document.

    The arguments do not count the added tokens: ``tokens`` has the ids of all documents, one after the other, and
    ``ends`` has the index after the last id of each document.
    """

    def __init__(self, tokens: Tokens, ends: NDArray[np.int64], end_of_text: int) -> None:
        self._tokens, self._ends, self._end_of_text = tokens, ends, end_of_text
        self._added = ends + np.arange(len(ends))  # positions of the added tokens

    def __len__(self) -> int:
        return len(self._tokens) + len(self._ends)

    def __getitem__(self, index: slice, /) -> NDArray[Any]:
        start, stop, step = index.indices(len(self))
        assert step == 1
        first, last = np.searchsorted(self._added, (start, stop)).tolist()
        ids = self._tokens[start - first : stop - last].astype(np.int64)
        return np.insert(ids, self._ends[first:last] - (start - first), self._end_of_text)


def refuse_two_uses(used: Iterable[tuple[str, str, str]]) -> None:
    """Raise InputError if the same token ids have two uses, such as training and validation (see :func:`uses`).

    ``used``: (digest of the ids, name, use) of each part.
    """
    first: dict[str, tuple[str, str]] = {}
    for digest, name, use in used:
        other, before = first.setdefault(digest, (name, use))
        if use != before:
            raise InputError(
                f"{other} ({before}) and {name} ({use}) have the same token ids, and leaven would validate "
                "on tokens that it trains on; give other files, or set the same validation in both sources"
            )


@dataclass(frozen=True)
class TokenReader:
    """Reads the token ids of sources that are already tokenised."""

    vocab_size: int  # ids must be below this number
    end_of_text: int | None  # id of the token that ends documents; None if unknown
    needs_ends: bool  # if true, refuse sources whose ends of documents are unknown
    memory: Path  # folder that caches the surveys (`TokenSurvey`) of files
    progress: OnProgress | None = None

    def shards(self, sources: Sequence[tuple[DataSource, SourceParts]]) -> list[Shards]:
        """Return the training and the validation tokens of each source.

        If a source has ``validation``, its own ids are all for training. If it has none, every file is divided into
        stretches (`STRETCHES`), and the end of each stretch is for validation, in whole documents if possible.

        ``end_of_text`` is added after each document if fewer than half of a source's documents have an end-of-text
        token. This needs files that store where documents end.

        Raises:
            InputError: if a file cannot be used, an id is not in the vocabulary, the ends of documents are needed but
                unknown, or the same ids have different :func:`uses`, such as training and validation.
            OSError: if ``memory`` cannot be written.
        """
        read, used = [], []
        for source, parts in sources:
            ids, others = self._read(source, parts.ids), None
            known = [*zip(ids.parts, ids.digests, strict=True)]
            if parts.validation:
                others = self._read(source.model_copy(update={"source": source.validation}), parts.validation)
                known += zip(others.parts, others.digests, strict=True)
            read.append((ids, others))
            both = zip(uses(parts), known, strict=True)
            used += [(digest, part.name, use) for (part, use), (mapped, digest) in both if len(mapped)]
        refuse_two_uses(used)
        return [self._shards(ids, others) for ids, others in read]

    def _shards(self, ids: "_SourceIds", others: "_SourceIds | None") -> Shards:
        content = " ".join([str(FORMAT), str(self.end_of_text), *ids.digests])
        if ids.added is not None and ids.inside:  # versions of leaven before December 2026 added none
            content += " added"
        train: list[Tokens] = []
        validation: list[Tokens] = []
        notes = ids.notes
        if others is None:
            for mapped in ids.parts:
                start = 0
                for cut, stop in _held_out(mapped, ids.occurring):
                    train += ids.between(mapped, start, cut)
                    validation += ids.between(mapped, cut, stop)
                    start = stop
        else:
            train = [tokens for mapped in ids.parts for tokens in ids.between(mapped, 0, len(mapped))]
            validation = [tokens for mapped in others.parts for tokens in others.between(mapped, 0, len(mapped))]
            content = " ".join([content, *others.digests])
            notes += others.notes
        fingerprint = storage.digest(content.encode(), 16)
        return Shards(ShardedTokens(train), ShardedTokens(validation), 0, 0, fingerprint, notes)

    def _read(self, source: DataSource, parts: Sequence[TokenPart]) -> "_SourceIds":
        """Return the token ids of all parts of a source. Raise InputError if they cannot be used."""
        name, end_of_text = source.source, self.end_of_text
        mapped = {part.key: opened(part) for part in parts}
        if not any(map(len, mapped.values())):
            raise InputError(f"data.source {name!r} contains no tokens; give files that contain token ids")
        raw = any(ids.raw for ids in mapped.values())
        if raw and self.vocab_size > 2**16:
            raise InputError(
                f"data.source {name!r} does not state its dtype, and a vocabulary of {self.vocab_size:,} tokens is "
                f'too large for uint16; write source = [{{ source = "{name}", dtype = "uint32" }}]'
            )
        meter = Meter(self.progress, "reading", sum(part.size for part in parts))
        surveys = cached_surveys(
            parts,
            surveys_file(self.memory, name, str(FORMAT), source.text, str(source.dtype), str(end_of_text)),
            meter,
            lambda part, meter: _survey(mapped[part.key], end_of_text, meter),
            lambda part, values: _cached(mapped[part.key], values),
        )
        meter.finish()
        for part, survey in zip(parts, surveys, strict=True):
            wrong = survey.lowest if survey.lowest < 0 else survey.highest
            if not 0 <= wrong < self.vocab_size:
                suggestion = (
                    "set vocab_size in [model], and data.tokenizer if you use it, to the values with which the file "
                    "was written"
                )
                if source.dtype:
                    suggestion += f", or set dtype, now {source.dtype}, to the dtype of the file"
                if wrong < 0:
                    suggestion = "give inputs, not labels or padding"
                raise InputError(
                    f"{part.name} has the token id {wrong:,}, but the vocabulary has the ids 0 to "
                    f"{self.vocab_size - 1:,}; {suggestion}"
                )
        notes = [f"{name}: the files do not state a dtype; their ids are read as uint16"] * raw
        known = all(ids.ends is not None for ids in mapped.values())
        ends = sum(survey.ends for survey in surveys)
        documents = sum(len(ids.ends) for ids in mapped.values() if ids.ends is not None) if known else 0
        adds = end_of_text is not None and (not ends or 2 * ends < documents)
        some = f"{documents:,} documents have {ends:,} end-of-text tokens"
        if adds and known:
            having = some if ends else "documents have no end-of-text token"
            notes.append(f"{name}: {having}; id {end_of_text:,} is added after each document")
        elif 0 < ends < documents:
            notes.append(f"{name}: {some} (id {end_of_text:,}); none is added, so some documents end without one")
        elif adds and self.needs_ends:
            raise InputError(
                f"{name!r} does not contain the end-of-text token {end_of_text:,}, so leaven cannot find the ends of "
                "its documents; set end_of_text in [data] to the id that ends them, or remove end_of_text and set "
                'documents = "packed"'
            )
        notes += _same_at_the_end(name, [(part.name, mapped[part.key]) for part in parts], end_of_text)
        for ids, survey in zip(mapped.values(), surveys, strict=True):
            for array, checksums in _of_arrays(ids, survey):
                array.set_checksums(checksums)
        return _SourceIds(
            [*mapped.values()],
            [survey.digest for survey in surveys],
            occurring=None if adds else end_of_text,
            added=end_of_text if adds and known else None,
            inside=bool(ends),
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class _SourceIds:
    parts: list[MappedTokens]
    digests: list[str]  # one for each part
    occurring: int | None  # the end-of-text token, if it is known and occurs in the files
    added: int | None  # the end-of-text token, if it is added after each document
    inside: bool  # whether the end-of-text token occurs in the files
    notes: tuple[str, ...]

    def between(self, mapped: MappedTokens, start: int, stop: int) -> list[Tokens]:
        """Return tokens ``start`` to ``stop - 1`` of ``mapped``. If :attr:`added` is not None, this token
        follows each document."""
        views = ShardedTokens(mapped.arrays).between(start, stop)
        if self.added is None:
            return views
        assert mapped.ends is not None
        first, last = np.searchsorted(mapped.ends, (start, stop), side="right")
        return [DocumentTokens(ShardedTokens(views), mapped.ends[first:last] - start, self.added)]


def _survey(mapped: MappedTokens, end_of_text: int | None, meter: Meter) -> TokenSurvey:
    content, checksums = blake2b(digest_size=16), ""
    lowest, highest, ends = 0, 0, 0
    for array in mapped.arrays:
        blocks = BlockChecksums()
        content.update(array.dtype.str.encode())
        for first in range(0, len(array), _BLOCK):
            ids = np.ascontiguousarray(array[first : first + _BLOCK])
            content.update(ids.data)
            blocks.update(ids.data)
            lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
            if end_of_text is not None:
                ends += int(np.count_nonzero(ids == end_of_text))
            meter.advance(ids.nbytes)
        checksums += blocks.hexdigest()
    content.update(b"" if mapped.ends is None else np.ascontiguousarray(mapped.ends).data)
    return TokenSurvey(content.hexdigest(), lowest, highest, ends, checksums)


def _cached(mapped: MappedTokens, values: dict[str, Any]) -> TokenSurvey:
    """Return the survey with the cached ``values``. Raise ValueError or TypeError if they are damaged."""
    survey = TokenSurvey(**values)
    if not all(checksums_fit(checksums, ids.n_bytes) for ids, checksums in _of_arrays(mapped, survey)):
        raise ValueError
    return survey


def _of_arrays(mapped: MappedTokens, survey: TokenSurvey) -> Iterator[tuple[FileTokens | ArrayTokens, str]]:
    at = 0
    for array in mapped.arrays:
        yield array, survey.blocks[at : (at := at + checksums_size(array.n_bytes))]


def _same_at_the_end(
    source: str, files: Sequence[tuple[str, MappedTokens]], end_of_text: int | None
) -> Iterator[str]:
    """Yield one note if some files end with many copies of one token id that is not ``end_of_text``."""
    found = []
    for name, mapped in files:
        end = ShardedTokens(mapped.arrays)[max(len(mapped) - LONGEST_END - 1, 0) :]
        if len(end) > LONGEST_END and end[0] != end_of_text and (end == end[0]).all():
            found.append((name, int(end[0])))
    if not found:
        return
    line = (
        f"{source}: {len(found):,} of {len(files):,} files end with more than {LONGEST_END:,} equal token ids, such "
    )
    line += f"as {found[0][0]}, which ends with {found[0][1]:,}; if a program was stopped while it wrote the "
    yield f"{line}files, write them again".encode(errors="replace").decode()  # a file name can be invalid UTF-8


def _held_out(mapped: MappedTokens, end_of_text: int | None) -> Iterator[tuple[int, int]]:
    """Yield (first position, position after the last) of each validation part of a file, in order."""
    size = len(mapped)
    count = min(max(size // STRETCH_TOKENS, 1), STRETCHES)
    start = 0
    for number in range(1, count + 1):
        stop = _document_end(mapped, size * number // count, size, end_of_text)
        if stop <= start:  # a document is longer than a stretch
            continue
        cut = start + max(int((stop - start) * (1 - VALIDATION_SHARE)), 1)
        end = _document_end(mapped, cut, stop, end_of_text)
        yield (end if end < stop else cut), stop
        start = stop


def _document_end(mapped: MappedTokens, position: int, stop: int, end_of_text: int | None) -> int:
    """Return the first position from ``position`` on at which a document ends, but at most ``stop``."""
    if mapped.ends is not None:
        found = np.searchsorted(mapped.ends, position)
        return min(int(mapped.ends[found]), stop) if found < len(mapped.ends) else stop
    if end_of_text is None:
        return position
    tokens = ShardedTokens(mapped.arrays)
    for first in range(position - 1, stop, _BLOCK):
        places = np.flatnonzero(tokens[first : min(first + _BLOCK, stop)] == end_of_text)
        if places.size:
            return first + int(places[0]) + 1
    return stop
