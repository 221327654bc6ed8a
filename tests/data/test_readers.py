"""Documents and files that cannot be read are counted, named and skipped, up to a share."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from leaven.data.corpus import Corpus, open_corpora
from leaven.recipe.data import DataSource
from leaven.recipe.errors import InputError


def opened(source: object, share: float, text: str = "text") -> Corpus:
    return open_corpora([DataSource(source=str(source), text=text)], share)[0]


def read(corpus: Corpus) -> dict[str, str]:
    return {document.key: document.text for document in corpus.documents()}


def good_lines(count: int) -> list[bytes]:
    return [json.dumps({"text": f"line {number} of the file"}).encode() for number in range(1, count + 1)]


BAD_LINES = {
    "no JSON": (b'{"text": "cut of', "is not JSON (Invalid control character"),
    "no object": (b'["text"]', 'has no text under the key "text"; write {"text": "..."}'),
    "no text": (b'{"body": "x"}', "has no text"),
    "a number": (b'{"text": 5}', "has no text"),
    "Latin-1": (b'{"text": "caf\xe9"}', "is not UTF-8 (byte 0xe9 at 13)"),
    "too deep": (b"[" * 100_000, "is not JSON"),
    "too long a number": (b'{"text": ' + b"9" * 5_000 + b"}", "is not JSON"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_named_and_skipped(tmp_path: Path, what: str) -> None:
    bad, why = BAD_LINES[what]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join([*good_lines(6), bad, b"", *good_lines(3)]))
    corpus = opened(path, share=0.1)
    assert list(read(corpus)) == [f"some.jsonl:{n}" for n in (1, 2, 3, 4, 5, 6, 9, 10, 11)]
    assert f"1 of 10 documents of data.source '{path}' cannot be read and were skipped: {path}:7 " in corpus.skipped
    assert why in corpus.skipped
    with pytest.raises(InputError) as caught:
        opened(path, share=0.09)
    message = str(caught.value)
    assert message.startswith(f"1 of 10 documents of data.source '{path}' cannot be read; repair them, or raise ")
    assert f"corrupt_share in [data] above 0.09: {path}:7 " in message
    assert why in message
    assert "\n" not in message


def test_only_the_first_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b"{", *good_lines(3), *[b"["] * 9]))
    skipped = opened(tmp_path / "a.jsonl", share=1.0).skipped
    assert skipped.startswith("10 of 13 documents")
    assert skipped.count(str(tmp_path)) == 1 + 3
    assert skipped.endswith("; ...")


def zstandard(raw: bytes) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as file:
        file.write(raw)
    return stream.getvalue().to_pybytes()


def table(rows: int, column: str = "text") -> bytes:
    stream = pa.BufferOutputStream()
    texts = [f"row {number} {number**9}" for number in range(rows)]
    parquet.write_table(pa.table({column: texts}), stream, row_group_size=1_000, compression="none")
    return stream.getvalue().to_pybytes()


def flipped(raw: bytes) -> bytes:
    half = len(raw) // 2
    return raw[:half] + bytes(byte ^ 0xFF for byte in raw[half : half + 50]) + raw[half + 50 :]


LINES = b"\n".join(good_lines(2_000))
BROKEN: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "truncated gzip": ("x.jsonl.gz", lambda: gzip.compress(LINES)[:-2_000], "ended before the end-of-stream"),
    "no gzip": ("x.jsonl.gz", lambda: LINES, "Not a gzipped file"),
    "flipped gzip": ("x.jsonl.gz", lambda: flipped(gzip.compress(LINES)), "cannot be read to its end ("),
    "truncated zstandard": ("x.jsonl.zst", lambda: zstandard(LINES)[:-100], "Truncated compressed stream"),
    "no zstandard": ("x.jsonl.zst", lambda: LINES, "ZSTD decompress failed"),
    "truncated parquet": ("x.parquet", lambda: table(5_000)[:-10], "cannot be read as parquet"),
    "empty parquet": ("x.parquet", lambda: b"", "cannot be read as parquet"),
    "flipped parquet": ("x.parquet", lambda: flipped(table(5_000))[:-8] + b"....PAR1", "cannot be read as parquet"),
    "no column": ("x.parquet", lambda: table(5, "body"), "has no column text, only body; name one: source = ["),
    "Latin-1": ("x.txt", lambda: b"caf\xe9", "is not UTF-8 (byte 0xe9 at 3)"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_named_and_skipped(tmp_path: Path, what: str) -> None:
    name, content, why = BROKEN[what]
    for number in range(9):
        (tmp_path / f"a{number}.txt").write_text("whole")
    (tmp_path / name).write_bytes(content())
    corpus = opened(f"{tmp_path}/*", share=0.1)
    assert list(read(corpus)) == [f"a{n}.txt" for n in range(9)]
    assert f"1 of 10 files of data.source '{tmp_path}/*' cannot be read and were skipped: {tmp_path}/{name}" in (
        corpus.skipped
    )
    assert why in corpus.skipped
    with pytest.raises(InputError) as caught:
        opened(f"{tmp_path}/*", share=0.09)
    assert f"{tmp_path}/{name}" in str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_utf_8_in_a_parquet_row_does_not_affect_other_rows(tmp_path: Path) -> None:
    rows = [f"row {number}".encode() for number in range(600)]
    rows[300] = b"caf\xe9"
    # A column of strings with invalid UTF-8.
    offsets = pa.array([sum(map(len, rows[:n])) for n in range(601)], pa.int32())
    text = pa.StringArray.from_buffers(600, offsets.buffers()[1], pa.py_buffer(b"".join(rows)))
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"text": text}), path)
    corpus = opened(path, share=0.01)
    assert corpus.n_documents == 599
    assert f"{path}:301 is not UTF-8 (byte 0xe9 at 3)" in corpus.skipped


def test_the_key_or_column_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"content": "one", "text": "no"}\n')
    (tmp_path / "x.parquet").write_bytes(table(3, "content"))
    found = read(opened(f"{tmp_path}/*", share=0.0, text="content"))
    assert found["x.jsonl:1"] == "one"
    assert found["x.parquet:3"] == "row 2 512"
