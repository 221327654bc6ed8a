"""Documents of every format, their split, what cannot be read, and the cache of surveys."""

import gzip
import json
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tests.errors import refused

from leaven.data import corpus as module
from leaven.data import readers
from leaven.data.corpus import VALIDATION_SHARE, Corpus, open_corpora
from leaven.data.readers import BrokenFile, File
from leaven.data.sources import source_parts
from leaven.data.tokens import TokenSet, prepare
from leaven.errors import InputError
from leaven.recipe.data import Data, DataSource


def opened(source: object, share: float = 0.0, text: str = "text", memory: Path | None = None) -> Corpus:
    return open_corpora([DataSource(source=str(source), text=text)], share, memory)[0]


def read(corpus: Corpus) -> dict[str, str]:
    return {document.key: document.text for document in corpus.documents()}


def sides(corpus: Corpus) -> tuple[list[str], list[str]]:
    documents = list(corpus.documents())
    return [d.key for d in documents if not d.validation], [d.key for d in documents if d.validation]


def good_lines(count: int) -> list[bytes]:
    return [json.dumps({"text": f"line {number} of the file"}).encode() for number in range(1, count + 1)]


def zstandard(raw: bytes) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as file:
        file.write(raw)
    return stream.getvalue().to_pybytes()


def table(rows: int, column: str = "text", **options: Any) -> bytes:
    stream = pa.BufferOutputStream()
    texts = [f"row {number} {number**9}" for number in range(rows)]
    parquet.write_table(pa.table({column: texts}), stream, row_group_size=1_000, compression="none", **options)
    return stream.getvalue().to_pybytes()


def test_the_standard_library_is_sorted_and_has_no_tests_or_packages() -> None:
    corpus = opened("python-stdlib")
    keys = [part.key for part in corpus.parts]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py"} <= set(keys)
    folders = {folder for key in keys for folder in key.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages"}
    assert 4e6 < corpus.n_bytes < 40e6


def test_the_shipped_text_is_the_same_everywhere() -> None:
    corpus = opened("tiny-shakespeare")
    assert (corpus.n_documents, corpus.fingerprint) == (133, "5d2f43ea656e113ff53b1da1d2618bf5")
    train, validation = sides(corpus)
    assert (len(train), len(validation)) == (127, 6)


def test_the_split_is_near_its_share_and_stable_when_documents_are_added(tmp_path: Path) -> None:
    def split(count: int) -> tuple[list[str], list[str]]:
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(good_lines(count)))
        return sides(opened(tmp_path / "a.jsonl"))

    train, validation = split(2_000)
    assert len({*train, *validation}) == len(train) + len(validation) == 2_000
    # Four standard deviations of a binomial.
    tolerance = 4 * (VALIDATION_SHARE * (1 - VALIDATION_SHARE) / 2_000) ** 0.5
    assert abs(len(validation) / 2_000 - VALIDATION_SHARE) < tolerance
    more_train, more_validation = split(3_000)
    assert set(validation) <= set(more_validation)
    assert not set(validation) & set(more_train)


@pytest.mark.parametrize("low", [False, True])
def test_neither_split_of_two_documents_is_empty(tmp_path: Path, low: bool) -> None:
    """Also if the hashes of both names are below the share of validation."""
    names = [f"{n}.txt" for n in range(1_000) if (blake2b(f"{n}.txt".encode(), digest_size=8).digest()[0] < 5) is low]
    for name in names[:2]:
        (tmp_path / name).write_text("text")
    train, validation = sides(opened(f"{tmp_path}/*.txt"))
    assert (len(train), len(validation)) == (1, 1)


def test_a_single_document_is_cut_at_a_line_if_it_has_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    text = "".join(f"line {number}\n" for number in range(1_000))
    path.write_text(text)
    train, validation = opened(path).documents()
    assert train.text + validation.text == text
    assert (train.validation, validation.validation) == (False, True)
    assert train.text.endswith("\n")
    assert 0.05 <= len(validation.text) / len(text) < 0.052
    path.write_text("x" * 1_000)
    assert [len(document.text) for document in opened(path).documents()] == [950, 50]


def test_every_format_is_read_document_by_document(tmp_path: Path) -> None:
    (tmp_path / "[a].txt").write_bytes("\ufeffcafé\r\nnext".encode())
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / ".txt").write_text("no name")
    (tmp_path / "empty.jsonl").write_text("")
    texts = ("zwölf", "\ud83d\ude00 whole", "line\u2028separator", None, " ")
    lines = [json.dumps({"text": text, "id": 1}) for text in texts]
    (tmp_path / "b.jsonl").write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n') + gzip.compress(b'{"text": "four"}'))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard(b'{"text": "five"}\n{"text": "six"}\n'))
    for name, kind in (("e", pa.string()), ("f", pa.large_string())):
        texts = pa.array([f"row {number}" for number in range(600)] + [None, ""], kind)
        parquet.write_table(pa.table({"n": range(602), "text": texts}), tmp_path / f"{name}.parquet")
    assert read(opened(f"{tmp_path}/*")) == {
        "[a].txt": "café\r\nnext",
        "b.jsonl:1": "zwölf",
        "b.jsonl:3": "😀 whole",
        "b.jsonl:5": "line\u2028separator",
        "c.jsonl.gz:1": "three",
        "c.jsonl.gz:2": "four",
        "d.jsonl.zst:1": "five",
        "d.jsonl.zst:2": "six",
        **{f"{name}.parquet:{number + 1}": f"row {number}" for name in "ef" for number in range(600)},
    }
    assert [document.text for document in opened(tmp_path / ".txt").documents()] == ["no nam", "e"]
    assert opened(tmp_path / "[a].txt").n_documents == 1  # an existing file is not a pattern


def test_the_key_or_column_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"content": "one", "text": "no"}\n')
    (tmp_path / "x.parquet").write_bytes(table(3, "content"))
    found = read(opened(f"{tmp_path}/*", text="content"))
    assert (found["x.jsonl:1"], found["x.parquet:3"]) == ("one", "row 2 512")


@pytest.mark.long
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
@settings(max_examples=10)
def test_the_fingerprint_depends_only_on_keys_and_texts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    def fingerprint(folder: Path, texts: list[str]) -> str:
        rows = [*texts, "at least one"]
        (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        return opened(f"{folder}/*.jsonl").fingerprint

    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    assert fingerprint(here, texts) == fingerprint(there, texts)
    assert fingerprint(here, [*texts, "more"]) != fingerprint(there, texts)
    assert fingerprint(here, [texts[0] + "x", *texts[1:]]) != fingerprint(there, texts)


def test_bad_sources_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "blank.txt").write_text("\n")
    parquet.write_table(pa.table({"text": [1]}), tmp_path / "number.parquet")
    for source, message in {
        "hf://org/data?splt=a": "splt is unknown; the options are config, revision, split",
        "hf://": "has no name; write hf://org/name",
        f"{tmp_path}/none.txt": "matches no file; give python-stdlib, tiny-shakespeare, hf://org/dataset,",
        f"{tmp_path}/*/none*.txt": "matches no file",
        f"{tmp_path}": f"is a folder; give a pattern of the files in it, for example '{tmp_path}/**/*.txt'",
        f"{tmp_path}/n*.md": "notes.md is not a .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet file",
        f"{tmp_path}/blank.txt": "contains no text",
        f"{tmp_path}/number.parquet": "has int64 in column text, not string",
    }.items():
        with refused(message):
            opened(source)


BAD_LINES = {
    "no JSON": (b'{"text": "cut of', "is not JSON (Invalid control character"),
    "no object": (b'["text"]', 'has no text under the key "text"; write {"text": "..."}'),
    "a number": (b'{"text": 5}', "has no text"),
    "Latin-1": (b'{"text": "caf\xe9"}', "is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 13"),
    "half of a surrogate pair": (
        b'{"text": "caf\\ud83d"}',
        "is not UTF-8 ('utf-8' codec can't encode character '\\ud83d'",
    ),
    "too deep": (b"[" * 100_000, "is not JSON"),
    "two texts": (
        b'{"text": "long", "text": "b"}',
        'two ways (one JSON object has the key "text" 2 times; keep one)',
    ),
    "two texts with escapes": (b'{"text": "long", "te\\u0078t": "b"}', 'the key "text" 2 times'),
    "too long a number": (b'{"text": ' + b"9" * 5_000 + b"}", "is not JSON"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_line_is_named_and_skipped(tmp_path: Path, what: str) -> None:
    bad, why = BAD_LINES[what]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join([*good_lines(6), bad, b"", *good_lines(3)]))
    corpus = opened(path, share=0.1)
    assert list(read(corpus)) == [f"some.jsonl:{n}" for n in (1, 2, 3, 4, 5, 6, 9, 10, 11)]
    counted = f"1 of 10 documents of data.source '{path}' cannot be read"
    assert corpus.skipped.startswith(f"{counted} and were skipped: {path}:7 ")
    assert why in corpus.skipped
    with refused(f"{counted}; repair them, or raise corrupt_share in [data] above 0.09: {path}:7 ", why):
        opened(path, share=0.09)


def test_only_the_first_faults_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([b"{", *good_lines(3), *[b"["] * 9]))
    skipped = opened(tmp_path / "a.jsonl", share=1.0).skipped
    assert skipped.startswith("10 of 13 documents")
    assert skipped.count(str(tmp_path)) == 1 + 3
    assert skipped.endswith("; ...")


LINES = b"\n".join(good_lines(2_000))
BROKEN: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "truncated gzip": ("x.jsonl.gz", lambda: gzip.compress(LINES)[:-2_000], "Truncated compressed stream"),
    "empty gzip": ("x.jsonl.gz", lambda: b"", "0 bytes"),
    "zeros in place of a gzip member": (
        "x.jsonl.gz",
        lambda: gzip.compress(LINES) + bytes(100) + gzip.compress(LINES),
        "cannot be read to its end (",
    ),
    "truncated zstandard": ("x.jsonl.zst", lambda: zstandard(LINES)[:-100], "Truncated compressed stream"),
    "empty parquet": ("x.parquet", lambda: b"", "Parquet file size is 0 bytes); write it again or leave it out"),
    "changed text in a parquet page": (
        "x.parquet",
        lambda: table(5_000, write_page_checksum=True, use_dictionary=False).replace(b"row 7 ", b"row 9 "),
        "CRC checksum verification failed",
    ),
    "no column": ("x.parquet", lambda: table(5, "body"), "has no column text, only body; name one: source = ["),
    "zeros": ("x.txt", lambda: b"text" + bytes(100), "contains NUL bytes, which no text has; write it again"),
    "Latin-1": ("x.txt", lambda: b"caf\xe9", "is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_named_and_skipped(tmp_path: Path, what: str) -> None:
    name, content, why = BROKEN[what]
    for number in range(9):
        (tmp_path / f"a{number}.txt").write_text("whole")
    (tmp_path / name).write_bytes(content())
    corpus = opened(f"{tmp_path}/*", share=0.1)
    assert list(read(corpus)) == [f"a{n}.txt" for n in range(9)]
    counted = f"1 of 10 files of data.source '{tmp_path}/*' cannot be read"
    assert corpus.skipped.startswith(f"{counted} and were skipped: {tmp_path}/{name} ")
    assert why in corpus.skipped
    with refused(why):
        opened(f"{tmp_path}/*", share=0.09)


@pytest.mark.parametrize(
    ("name", "content"), [("x.txt", b""), ("x.jsonl", b""), ("x.jsonl", b'{"text": null}\n' * 9)]
)
def test_a_file_without_text_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "a.txt").write_text("whole")
    assert opened(f"{tmp_path}/*").skipped == ""
    (tmp_path / name).write_bytes(content)
    line = f"data.source '{tmp_path}/*': no text in 1 of 2 files, such as {tmp_path}/{name}"
    for _ in range(2):  # the second time, the survey comes from the cache
        assert opened(f"{tmp_path}/*", memory=tmp_path / ".cache").skipped == line


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_rows_without_text_are_counted(tmp_path: Path, name: str) -> None:
    """Data sets that were concatenated have null in a column that only one of them has."""
    path = tmp_path / name

    def skipped(texts: list[str | None]) -> str:
        if name == "x.parquet":
            parquet.write_table(pa.table({"text": texts}), path)
        else:
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return opened(path).skipped

    assert skipped(["text"] * 4) == ""
    line = f"data.source '{path}': no text in 4 of 8 documents, such as in {path}"
    assert skipped([*["text"] * 4, None, None, "", " "]) == line
    counted = f"data.source '{path}': no text in 180 of 200 documents, such as in {path}"
    assert skipped([*["text"] * 20, *[None] * 180]) == counted
    (tmp_path / "a.txt").write_text("")
    assert opened(f"{tmp_path}/*").skipped.split("; ") == [
        f"data.source '{tmp_path}/*': no text in 1 of 2 files, such as {tmp_path}/a.txt",
        f"data.source '{tmp_path}/*': no text in 180 of 200 documents, such as in {path}",
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_every_arrow_type_of_strings_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", None, "zwei", *(f"text {number % 7}" for number in range(600))]
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"text": pa.array(texts).cast(kind), "id": range(603)}), path)
    assert parquet.read_schema(path).field("text").type == kind
    found = read(opened(path))
    assert found == {f"x.parquet:{row}": text for row, text in enumerate(texts, start=1) if text}
    with refused("has int64 in column id, not strings"):
        opened(path, text="id")


def test_a_category_of_pandas_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": pa.array(["a", "b"]).dictionary_encode()}), tmp_path / "x.parquet")
    with refused("has dictionary<values=string, indices=int32, ordered=0> in column text, not strings"):
        opened(tmp_path / "x.parquet")


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
    assert f"{path}:301 is not UTF-8 ('utf-8' codec can't decode byte 0xe9 in position 3" in corpus.skipped


def test_a_file_that_changes_or_vanishes_while_it_is_read_is_named(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    corpus = opened(f"{tmp_path}/*.txt")
    (tmp_path / "b.txt").write_text("B")
    with pytest.raises(InputError, match=r"b\.txt has changed since its first reading: its text is different"):
        list(corpus.documents())
    (tmp_path / "b.txt").unlink()
    with pytest.raises(InputError, match=r"b\.txt has changed .*: it cannot be read to its end \(No such file"):
        list(corpus.documents())


def write(path: Path, text: str, age_seconds: float = 60) -> None:
    path.write_text(text)
    os.utime(path, (time.time() - age_seconds,) * 2)


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the files that are read. The change time of a file cannot be set, so changes settle at once."""
    seen: list[str] = []
    rows = File.rows
    monkeypatch.setattr(File, "rows", lambda file: (seen.append(file.key), rows(file))[1])
    monkeypatch.setattr(readers, "SETTLED_NS", 0)
    return seen


def test_only_changed_files_are_read_again(tmp_path: Path, surveyed: list[str]) -> None:
    memory = tmp_path / "memory"
    for name in "abc":
        write(tmp_path / f"{name}.txt", name * 10)
    first = opened(f"{tmp_path}/*.txt", memory=memory)
    assert surveyed == ["a.txt", "b.txt", "c.txt"]
    assert opened(f"{tmp_path}/*.txt", memory=memory) == first
    assert len(surveyed) == 3
    before = (tmp_path / "b.txt").stat()
    write(tmp_path / "b.txt", "B" * 10)
    os.utime(tmp_path / "b.txt", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    (tmp_path / "c.txt").unlink()
    write(tmp_path / "d.txt", "d")
    second = opened(f"{tmp_path}/*.txt", memory=memory)
    assert surveyed[3:] == ["b.txt", "d.txt"]
    assert second.fingerprint != first.fingerprint
    assert second == opened(f"{tmp_path}/*.txt")


def test_files_that_a_pattern_should_find_and_that_are_away_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "disk"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", name)
    (tmp_path / "b").symlink_to(tmp_path / "disk")
    pattern = f"{tmp_path}/[ab]/**/*.txt"
    assert [part.key for part in opened(pattern).parts] == ["a/a.txt", "b/a.txt"]
    (tmp_path / "a" / "lost+found").mkdir()  # which the root of a disk has, and only root can list
    (tmp_path / "a" / "lost+found" / "a.txt").write_text("no text")
    assert [part.key for part in opened(pattern).parts] == ["a/a.txt", "b/a.txt"]
    (tmp_path / "a" / "mount").mkdir()
    (tmp_path / "a" / "d").mkdir()
    write(tmp_path / "a" / "d" / "a.txt", "a")
    for matching in (pattern, f"{tmp_path}/a/*/*.txt", f"{tmp_path}/a/*/a.txt"):
        note = f"data.source '{matching}': {tmp_path}/a/mount is empty; if a disk belongs there, mount it"
        assert source_parts(DataSource(source=matching)).notes == (note,)
    (tmp_path / "a" / "mount2").mkdir()
    notes = prepare(Data(source=pattern, tokens=1_024), 300, tmp_path / ".cache").notes
    assert notes[0].startswith(f"data.source '{pattern}': 2 folders are empty, such as {tmp_path}/a/mount; if a disk")
    (tmp_path / "disk").rename(tmp_path / "away")
    for missed in (pattern, f"{tmp_path.parent}/{tmp_path.name[:-1]}?/b/*.txt"):
        with pytest.raises(InputError, match=rf"b is a link to {tmp_path}/disk, which is missing \(is its disk moun"):
            opened(missed)
    (tmp_path / "b").unlink()
    scandir = os.scandir

    def refused(path: Path) -> Any:
        if path == tmp_path / "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(InputError, match=rf"{tmp_path}/a cannot be read: Permission denied; make it readable"):
        opened(pattern)


def test_files_that_leaven_writes_are_no_text(tmp_path: Path) -> None:
    """A pattern such as **/*.jsonl also finds the folder of a run or check."""
    (tmp_path / "run").mkdir()
    for name, line in (
        ("events", '{"event": "start", "step": 0, "tokens": 0, "text": "of a fingerprint", "time": 1}'),
        ("metrics", '{"run": "a", "step": 1, "tokens": 1, "loss": 1, "grad_norm": 1}'),
        ("runs", '{"key": "a", "loss": 1, "tokens": 1, "flops": 1}'),
        ("x", '{"text": "a"}'),
    ):
        (tmp_path / "run" / f"{name}.jsonl").write_text(line)
    (tmp_path / "metrics.jsonl").write_text('{"event": "of the user", "text": "a"}')
    (tmp_path / "events.jsonl").write_text('{"event": "of the user", "tokens": 9, "time": 1, "text": "b"}')
    found = opened(f"{tmp_path}/**/*.[jt][sx]*").parts
    assert [part.key for part in found] == ["events.jsonl", "metrics.jsonl", "run/x.jsonl"]


def test_patterns_can_repeat_stars_and_go_up(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "g").mkdir()
    write(tmp_path / "a" / "b" / "c" / "x.txt", "a text")
    write(tmp_path / "g" / "x.txt", "another text")
    for pattern, keys in (
        ("a/**/**/*.txt", ["b/c/x.txt"]),
        ("g*/../a/*/*/*.txt", ["g/../a/b/c/x.txt"]),
        ("*/x.txt", ["g/x.txt"]),
    ):
        assert [part.key for part in opened(f"{tmp_path}/{pattern}").parts] == keys


@pytest.mark.parametrize(("part", "inside"), [("**.txt", "*.txt"), ("x**.txt", "x*.txt"), ("***", "*")])
def test_two_stars_with_other_characters_are_refused(tmp_path: Path, part: str, inside: str) -> None:
    """Glob takes them for one star, and finds nothing in subfolders."""
    write(tmp_path / "x.txt", "a text")
    hint = f"write **/{inside} to search subfolders, too, or {inside} to search none"
    with refused(f"{part} does not search subfolders; {hint}"):
        opened(f"{tmp_path}/{part}")
    write(tmp_path / "a**.txt", "the name of a file")
    assert [each.key for each in opened(f"{tmp_path}/a**.txt").parts] == ["a**.txt"]


def test_a_file_that_is_found_twice_is_refused(tmp_path: Path) -> None:
    """Under two keys, a document could be used for both training and validation."""

    def prepared(*patterns: str) -> TokenSet:
        sources = [{"source": f"{tmp_path}/{pattern}"} for pattern in patterns]
        return prepare(Data.model_validate({"source": sources, "tokens": 1_024}), 300, tmp_path / ".cache")

    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "a.jsonl").write_bytes(b"\n".join(good_lines(200)))
    (tmp_path / "v2" / "b.txt").write_text("another file")
    before = prepared("**/*.*").fingerprint
    (tmp_path / "loop").symlink_to(tmp_path)  # a link to a folder above does no harm
    assert prepared("**/*.*").fingerprint == before
    (tmp_path / "current").symlink_to("v2")
    with refused(
        "current/a.jsonl", "v2/a.jsonl", "are the same file, found twice, by data.source", "change the patterns"
    ):
        prepared("[cv]*/*.*")
    with refused(f"{tmp_path}/v2/b.txt is found twice, by data.source", f"and data.source '{tmp_path}/v2/b.txt';"):
        prepared("v*/*.*", "v2/b.txt")
    with refused("v2/b.txt", "current/b.txt are the same file, found twice, by data.source"):
        prepared("v*/*.*", "current/b.txt")
    # DVC and jdupes make hard links for different documents with equal content.
    (tmp_path / "v2" / "c.txt").hardlink_to(tmp_path / "v2" / "b.txt")
    assert len(prepared("v2/*").train) > 0


def test_files_that_are_missing_by_the_names_of_others_are_named(tmp_path: Path) -> None:
    """As after an interrupted download."""

    def notes(pattern: str) -> tuple[str, ...]:
        return source_parts(DataSource(source=f"{tmp_path}/{pattern}")).notes

    def shards(name: str, *numbers: int, count: int = 3) -> None:
        for number in numbers:
            path = tmp_path / f"{name.format(n=f'{number:05}-of-{count:05}')}"
            path.parent.mkdir(exist_ok=True)
            path.write_text("text")

    shards("train-{n}.txt", 0, 2)
    line = f"data.source '{tmp_path}/*.txt': the names of the files show that some are missing, such as "
    end = "; if a download was interrupted, repeat it; to use only some files, name them, such as train-0000[0-2]-*"
    assert notes("*.txt") == (f"{line}{tmp_path}/train-00001-of-00003.txt{end}",)
    assert notes("**/*") == (notes("*.txt")[0].replace("*.txt", "**/*"),)
    data = Data(source=f"{tmp_path}/*.txt", tokens=1_024)
    assert notes("*.txt")[0] in prepare(data, 300, tmp_path / ".cache").notes
    # Patterns that choose some files on purpose.
    for chosen in ("train-00000-of-00003.txt", "train-0000[02]-*.txt", "*-00002-of-00003.txt"):
        assert notes(chosen) == ()
    shards("train-{n}.txt", 1)
    assert notes("*.txt") == ()
    # Shards on the Hub have hashes.
    for number in (0, 2):
        shards(f"hub/train-{{n}}-{number}123456789abcdef.txt", number)
    (note,) = notes("hub/*")
    assert f"such as {tmp_path}/hub/train-00001-of-00003-*.txt; if" in note
    shards("hub/train-{n}-fedcba9876543210.txt", 1)
    assert notes("hub/*") == ()
    # Complete sets, numbers from 1, and names of another form.
    for name in ("a/one-{n}.txt", "a/x.{n}.jsonl"):
        shards(name, 1, 2, 3)
    shards("a/single-{n}.txt", 0, count=1)
    for name in ("train-00000.txt", "train-0-of-3.txt", "00000-of-00003.txt", "x-00000-of-00003"):
        (tmp_path / "a" / f"{name}.txt" if name.startswith("x") else tmp_path / "a" / name).write_text("text")
    (tmp_path / "a" / "x-00000-of-00003.txt").unlink()
    assert notes("**/*.*") == ()
    shards("many/x-{n}.txt", 0, count=99_999)
    assert "such as " + str(tmp_path / "many" / "x-00001-of-99999.txt") in notes("many/*")[0]


def test_a_shard_in_another_folder_of_the_source_is_not_missing(tmp_path: Path) -> None:
    """Some tools spread the files of a set over folders; a user moves a file to a folder for validation."""
    for number in range(10):
        (folder := tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        (folder / f"part-{number:05}-of-00010.txt").write_text("text")

    def notes(pattern: str) -> tuple[str, ...]:
        return source_parts(DataSource(source=f"{tmp_path}/{pattern}")).notes

    assert notes("**/*.txt") == notes("*/*.txt") == ()
    (note,) = notes("[01]/*.txt")  # these files of the set are not in the source
    assert "such as part-00002-of-00010.txt; if a download" in note
    # Two folders with a set each, such as snapshots or languages: a file of the one does not stand for the other's.
    for snapshot, numbers in (("abc", (0, 1, 3)), ("def", (0, 1, 2, 3))):
        (folder := tmp_path / "snapshots" / snapshot).mkdir(parents=True)
        for number in numbers:
            (folder / f"train-{number:05}-of-00004.txt").write_text(snapshot)
    (note,) = notes("snapshots/**/*.txt")
    assert f"such as {tmp_path}/snapshots/abc/train-00002-of-00004.txt; if" in note


def test_a_folder_or_pipe_with_the_name_of_a_file_is_named(tmp_path: Path) -> None:
    """Spark writes a folder of parts under the name that it was given."""
    (tmp_path / "y.jsonl").mkdir()
    (tmp_path / "y.jsonl" / "part-0.jsonl").write_bytes(b"\n".join(good_lines(9)))
    with refused(
        f"matches {tmp_path}/y.jsonl, which is not a file; to read the files in a folder", f"'{tmp_path}/y.jsonl/*.*'"
    ):
        opened(f"{tmp_path}/*.jsonl")
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(good_lines(9)))

    def notes(pattern: str) -> tuple[str, ...]:
        return source_parts(DataSource(source=f"{tmp_path}/{pattern}")).notes

    end = f"to read the files in a folder, give a pattern such as '{tmp_path}/y.jsonl/*.*'"
    line = f"data.source '{tmp_path}/*.jsonl':"
    assert notes("*.jsonl") == (f"{line} {tmp_path}/y.jsonl is not a file, so it is not read; {end}",)
    assert notes("**/*.jsonl") == ()  # the files in the folder are read
    os.mkfifo(tmp_path / "z.jsonl")
    assert notes("*.jsonl") == (
        f"{line} 2 paths, such as {tmp_path}/y.jsonl, are not files, so they are not read; {end}",
    )
    assert f"{tmp_path}/z.jsonl is not a file" in notes("**/*.jsonl")[0]
    data = Data(source=f"{tmp_path}/*.jsonl", tokens=1_024)
    assert prepare(data, 300, tmp_path / ".cache").notes == notes("*.jsonl")


def test_a_file_written_just_now_is_read_again(
    tmp_path: Path, surveyed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SETTLED_NS", 2 * 10**9)
    write(tmp_path / "a.txt", "text", age_seconds=0)
    for _ in range(2):
        opened(tmp_path / "a.txt", memory=tmp_path / "memory")
    assert surveyed == ["a.txt", "a.txt"]


@pytest.mark.parametrize(
    ("old", "new"), [('{"format"', "{"), ('"format": 4', '"format": 3'), ('"bytes": 4', '"bytes": 5')]
)
def test_a_damaged_or_old_survey_cache_is_rebuilt(tmp_path: Path, surveyed: list[str], old: str, new: str) -> None:
    write(tmp_path / "a.txt", "text")
    first = opened(tmp_path / "a.txt", memory=tmp_path / "memory")
    (file,) = (tmp_path / "memory").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(file.read_text().replace(old, new, 1))
    assert opened(tmp_path / "a.txt", memory=tmp_path / "memory") == first
    assert surveyed == ["a.txt", "a.txt"]
    assert json.loads(file.read_text()) == whole


def test_a_survey_that_was_read_wrongly_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "text")
    with monkeypatch.context() as patch:
        patch.setattr(File, "rows", lambda file: iter([("", "test", None)]))
        wrong = opened(tmp_path / "a.txt", memory=tmp_path / "memory")
    with pytest.raises(InputError, match=r"a.txt has changed since its first reading: .*; run the same command"):
        list(wrong.documents())
    assert [each.text for each in opened(tmp_path / "a.txt", memory=tmp_path / "memory").documents()] == ["tex", "t"]


def test_faults_are_cached_but_a_broken_file_is_read_again(tmp_path: Path, surveyed: list[str]) -> None:
    write(tmp_path / "a.jsonl", '{"text": "one"}\n{')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    first, again = (opened(f"{tmp_path}/*.*", 0.5, memory=tmp_path / "memory") for _ in range(2))
    assert "a.jsonl:2 is not JSON" in first.skipped
    assert f"{tmp_path}/b.txt is not UTF-8" in first.skipped
    assert again == first
    assert surveyed == ["a.jsonl", "b.txt", "b.txt"]


def test_surveys_are_saved_while_they_are_made(
    tmp_path: Path, surveyed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.txt", name)
    monkeypatch.setattr(module, "SAVE_EVERY_SECONDS", -1.0)
    rows = File.rows

    def killed(file: File) -> object:
        if file.key == "c.txt":
            raise KeyboardInterrupt
        return rows(file)

    with monkeypatch.context() as patch:
        patch.setattr(File, "rows", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(f"{tmp_path}/*.txt", memory=tmp_path / "memory")
    opened(f"{tmp_path}/*.txt", memory=tmp_path / "memory")
    assert surveyed == ["a.txt", "b.txt", "c.txt"]


def test_the_name_of_a_parquet_column_means_one_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array(["one", "two"])
    parquet.write_table(pa.table([texts, texts], names=["text", "text"]), path)
    with pytest.raises(BrokenFile, match="has 2 columns text; rename or remove all but one"):
        list(File("a", path).rows())
    structs = pa.array([{"x": "no"}, {"x": "no"}])
    parquet.write_table(pa.table([structs, texts], names=["t", "t.x"]), path)  # also the path of the struct's field
    assert [row.text for row in File("a", path, "t.x").rows()] == ["one", "two"]
