"""Open files of token ids that other programs wrote.

- Megatron-LM: ``NAME.bin`` with an index ``NAME.idx`` (`megatron/core/datasets/indexed_dataset.py`);
- llm.c: a ``.bin`` file with a header of 256 32-bit integers (`dev/data/data_common.py`);
- nanoGPT: any other ``.bin`` file. It contains only ids, by default of 16 bits (`data/*/prepare.py`);
- numpy: a ``.npy`` file with one dimension;
- Arrow: a column of lists of ids in a Hugging Face data set.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leaven.data.file_tokens import ArrayTokens, FileTokens, MappedFile
from leaven.data.readers import BrokenFile, FileStamp, file_stamp
from leaven.storage import require_file

TOKEN_SUFFIXES = (".bin", ".npy")

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, number of sequences, of documents
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point numbers

LLM_C_FORMATS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and dtype of llm.c's token files, by magic number. The first is for GPT-2, the second for Llama 3."""
_LLM_C_HEADER = 256 * 4  # bytes
_DATES = range(2020_00_00, 2100_00_00)  # llm.c's magic numbers are dates

BLOCKS = 16
"""If a column has at least this many rows, all of the same length, they count as blocks of a longer text, not as
documents. The last row may be shorter."""
_CHECKED_IDS = 2**20  # number of ids at the start of a file that are read to check the dtype


@dataclass(frozen=True)
class MappedTokens:
    """The token ids of a file, or of a split of a data set."""

    arrays: tuple[FileTokens | ArrayTokens, ...]  # the ids, one array after the other; a file has one array
    ends: NDArray[np.int64] | None  # positions after the last token of each document, ascending; None if unknown
    raw: bool = False  # whether uint16 is only assumed, because neither the file nor the recipe states a dtype

    def __len__(self) -> int:
        return sum(map(len, self.arrays))


@dataclass(frozen=True)
class TokenFile:
    key: str  # path of the file below the source
    path: Path
    dtype: str | None = None  # dtype that the recipe states; None if it states none

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def index(self) -> Path | None:
        """Megatron-LM's index of the file, or None if the file has no index."""
        index = self.path.with_suffix(".idx")
        return index if self.path.suffix == ".bin" and os.path.lexists(index) else None

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def stamp(self) -> FileStamp | None:
        stamp = file_stamp(self.path)
        if self.index is None or stamp is None:
            return stamp
        of_index = file_stamp(self.index)
        return None if of_index is None else stamp + of_index

    def open(self) -> MappedTokens:
        """Return the token ids, which are read on indexing.

        Raise BrokenFile if the file cannot be used, or the recipe states another dtype.
        """
        found = self._open()
        if self.dtype is not None and found.arrays[0].dtype.name != self.dtype:
            raise BrokenFile(f"has ids of {found.arrays[0].dtype.name}, not of {self.dtype}; remove dtype")
        return found

    def _open(self) -> MappedTokens:
        try:
            require_file(self.path)
            if self.index is not None:
                require_file(self.index)
            if self.path.suffix == ".npy":
                return self._numpy()
            size = self.size
            if not size:
                raise BrokenFile("is empty; write it again or leave it out")
            if self.index is not None:
                return _megatron(self.path, self.index)
            with self.path.open("rb") as file:
                head = file.read(_LLM_C_HEADER)
            header = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
            if len(header) == 256 and header[0] in _DATES and not header[4:].any():
                return _llm_c(self.path, size, *header[:3].tolist())
            return self._raw(size)
        except OSError as error:
            raise BrokenFile(f"cannot be read ({error.strerror or error})") from None

    def _raw(self, size: int) -> MappedTokens:
        dtype = np.dtype(self.dtype or "uint16").newbyteorder("<")
        if size % dtype.itemsize:
            raise BrokenFile(
                f"has {size:,} bytes, not a whole number of {dtype.name} ids; copy it again, or set dtype to that of "
                "the ids"
            )
        ids = _tokens(self.path, dtype)
        # If 32-bit ids are read as 16-bit numbers, every second number is 0; for 64-bit ids, three of four are 0.
        start, size = ids[:_CHECKED_IDS], dtype.itemsize
        while size < 8 and len(start) > 1 and not start[1::2].any() and start.any():
            start, size = start[::2], 2 * size
        if size > dtype.itemsize:
            wider = {2: "uint16", 4: "uint32", 8: "int64"}[size]
            raise BrokenFile(
                f"does not contain {dtype.name} ids, because every second id would be 0; "
                f'write source = [{{ source = ..., dtype = "{wider}" }}]'
            )
        return MappedTokens((ids,), None, raw=self.dtype is None)

    def _numpy(self) -> MappedTokens:
        with self.path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise BrokenFile("is not a numpy file; if it contains only token ids, rename it to .bin")
        try:
            ids: np.memmap[Any, Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OverflowError, TokenError) as error:  # of a damaged header
            raise BrokenFile(f"cannot be read ({error}); write it again or leave it out") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BrokenFile(f"has {ids.dtype} of shape {ids.shape}; write token ids as integers with one dimension")
        if (size := self.size) != (whole := ids.offset + ids.nbytes):
            raise BrokenFile(
                f"has {size:,} bytes, but its header says {len(ids):,} ids ({whole:,} bytes), so it is "
                "cut off or has more than one array; write it again, each array to a file of its own"
            )
        return MappedTokens((FileTokens(self.path, ids.dtype, len(ids), offset=ids.offset),), None)


def _megatron(path: Path, index: Path) -> MappedTokens:
    size = index.stat().st_size
    raw = np.memmap(index, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    if size < _MEGATRON_HEADER.size or raw[:9].tobytes() != MEGATRON_MAGIC:
        raise BrokenFile(
            f"has an index {index.name} with an unknown magic number; if Megatron-LM wrote it, copy it "
            "again, else remove it"
        )
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(raw[: _MEGATRON_HEADER.size].tobytes())
    if version != 1 or code not in _MEGATRON_DTYPES:
        raise BrokenFile(
            f"has an index {index.name} of version {version} with dtype code {code}, but leaven reads only version 1 "
            "with integers; write the file again in this format"
        )
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    # After the header: the length and the place (in bytes) of each sequence, and the first sequence of each document.
    whole = _MEGATRON_HEADER.size + sequences * (4 + 8) + documents * 8
    damaged = BrokenFile(
        f"has an index {index.name} that does not fit it; copy both files again, or write them again"
    )
    if size != whole:
        raise damaged
    lengths = np.frombuffer(raw, "<i4", sequences, _MEGATRON_HEADER.size)
    places = np.frombuffer(raw, "<i8", sequences, _MEGATRON_HEADER.size + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", documents, whole - 8 * documents)
    stops = np.cumsum(lengths, dtype=np.int64)
    tokens = int(stops[-1]) if sequences else 0
    if tokens * dtype.itemsize != path.stat().st_size:
        raise damaged
    if lengths.min() < 0 or (places != (stops - lengths) * dtype.itemsize).any():
        raise damaged
    ends = stops  # as in Megatron-LM's GPTDataset, where each sequence is a document
    if documents and firsts[-1] == sequences:
        if firsts[0] != 0 or (np.diff(firsts) < 0).any():
            raise damaged
        ends = np.concatenate([[0], stops])[firsts]
    return MappedTokens((_tokens(path, dtype),), ends[np.diff(ends, prepend=0) > 0])  # without empty documents


def _llm_c(path: Path, size: int, magic: int, version: int, tokens: int) -> MappedTokens:
    if magic not in LLM_C_FORMATS:
        known = " or ".join(map(str, LLM_C_FORMATS))
        raise BrokenFile(f"has a header with the unknown magic number {magic}; give a file of llm.c with {known}")
    expected, dtype = LLM_C_FORMATS[magic]
    if version != expected:
        raise BrokenFile(f"has a header of version {version}; give a file of version {expected}")
    whole = _LLM_C_HEADER + tokens * np.dtype(dtype).itemsize
    if tokens < 1 or size != whole:
        raise BrokenFile(
            f"has {size:,} bytes, but its header says {tokens:,} tokens ({whole:,} bytes); copy the whole file"
        )
    return MappedTokens((_tokens(path, np.dtype(dtype), _LLM_C_HEADER),), None)


def _tokens(path: Path, dtype: np.dtype[Any], offset: int = 0) -> FileTokens:
    return FileTokens(path, dtype, (path.stat().st_size - offset) // dtype.itemsize, offset=offset)


def arrow_tokens(chunks: list[Any], files: Sequence[tuple[MappedFile, ...]]) -> MappedTokens:
    """Return the token ids of an Arrow column whose rows are lists of ids. Raise BrokenFile if an id is null.

    Each row is a document, unless the rows seem to be equal blocks of a longer text (see `BLOCKS`).

    Args:
        chunks: the arrays that make up the column.
        files: for each array, the files whose memory maps hold its ids.
    """
    arrays: list[ArrayTokens] = []
    lengths = []
    for chunk, some in zip(chunks, files, strict=True):
        ids = chunk.flatten()
        if ids.null_count:
            raise BrokenFile("has nulls among its token ids; remove these rows")
        if len(ids):  # an empty array may have the type null
            arrays.append(ArrayTokens(ids.to_numpy(zero_copy_only=True), some))
        lengths.append(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
    rows = np.concatenate([*lengths, np.zeros(0, np.int64)]).astype(np.int64)
    blocks = len(rows) >= BLOCKS and (rows[:-1] == rows[0]).all() and rows[-1] <= rows[0]
    ends = np.cumsum(rows[rows > 0])
    return MappedTokens(tuple(arrays), None if blocks else ends)
