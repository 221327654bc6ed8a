import gzip
import json
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from leaven.data.corpus import VALIDATION_SHARE, Corpus, OnProgress, open_corpora
from leaven.recipe.data import DataSource
from leaven.recipe.errors import InputError


def open_corpus(source: str, progress: OnProgress | None = None, share: float = 0.0) -> Corpus:
    return open_corpora([DataSource(source=source)], share, progress=progress)[0]


def write_texts(folder: Path, count: int) -> str:
    for number in range(count):
        path = folder / f"{number % 7}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"document {number}\n" * (number % 7 + 1))
    return f"{folder}/**/*.txt"


def sides(corpus: Corpus) -> tuple[list[str], list[str]]:
    documents = list(corpus.documents())
    return [d.key for d in documents if not d.validation], [d.key for d in documents if d.validation]


def test_the_standard_library_is_listed_in_order_and_without_tests_or_packages() -> None:
    corpus = open_corpus("python-stdlib")
    keys = [part.key for part in corpus.parts]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py"} <= set(keys)
    folders = {folder for key in keys for folder in key.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages"}
    assert 4e6 < corpus.n_bytes < 40e6
    assert open_corpus("python-stdlib") == corpus


def test_the_split_is_by_document_near_its_share_and_the_same_each_time(tmp_path: Path) -> None:
    corpus = open_corpus(write_texts(tmp_path, 2_000))
    train, validation = sides(corpus)
    assert len(train) + len(validation) == corpus.n_documents == 2_000
    assert len({*train, *validation}) == 2_000
    # Four standard deviations of a binomial.
    assert (
        abs(len(validation) / 2_000 - VALIDATION_SHARE)
        < 4 * (VALIDATION_SHARE * (1 - VALIDATION_SHARE) / 2_000) ** 0.5
    )
    assert sides(open_corpus(corpus.source)) == (train, validation)


def test_a_document_keeps_its_side_when_others_are_added(tmp_path: Path) -> None:
    _, before = sides(open_corpus(write_texts(tmp_path, 1_000)))
    train, after = sides(open_corpus(write_texts(tmp_path, 1_500)))
    assert set(before) <= set(after)
    assert not set(before) & set(train)


@pytest.mark.parametrize("count", range(2, 12))
def test_few_documents_leave_no_side_empty(tmp_path: Path, count: int) -> None:
    train, validation = sides(open_corpus(write_texts(tmp_path, count)))
    assert train
    assert validation


def test_two_documents_that_both_fall_under_the_share_are_still_split(tmp_path: Path) -> None:
    # A property of the hash: the first names of this form that fall under it.
    names = [f"{n}.txt" for n in range(1_000) if blake2b(f"{n}.txt".encode(), digest_size=8).digest()[0] < 5]
    for name in names[:2]:
        (tmp_path / name).write_text("text")
    train, validation = sides(open_corpus(f"{tmp_path}/*.txt"))
    assert (len(train), len(validation)) == (1, 1)


def test_a_single_document_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    text = "".join(f"line {number}\n" for number in range(1_000))
    path.write_text(text)
    train, validation = open_corpus(str(path)).documents()
    assert train.text + validation.text == text
    assert (train.validation, validation.validation) == (False, True)
    assert train.text.endswith("\n")
    assert 0.05 <= len(validation.text) / len(text) < 0.052


def test_a_single_line_is_cut_where_the_share_falls(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("x" * 1_000)
    assert [len(document.text) for document in open_corpus(str(path)).documents()] == [950, 50]


def test_jsonl_has_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "zwölf", "\ud800half", "line\u2028separator")]
    path.write_text("\ufeff" + "\n\n".join(lines) + '\n{"text": " "}\n', encoding="utf-8")
    documents = {document.key: document.text for document in open_corpus(str(path)).documents()}
    assert documents == {
        "some.jsonl:1": "one",
        "some.jsonl:3": "zwölf",
        "some.jsonl:5": "?half",
        "some.jsonl:7": "line\u2028separator",
    }


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_has_a_document_a_row(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "some.parquet"
    texts = [f"row {number}" for number in range(1_000)] + [None, ""]
    parquet.write_table(pa.table({"n": range(1_002), "text": pa.array(texts, kind)}), path)
    corpus = open_corpus(str(path))
    documents = {document.key: document.text for document in corpus.documents()}
    assert corpus.n_documents == 1_000
    assert documents["some.parquet:1000"] == "row 999"


def test_a_glob_mixes_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffcafé\r\nnext".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": null}')
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n') + gzip.compress(b'{"text": "four"}'))
    with pa.output_stream(str(tmp_path / "d.jsonl.zst"), compression="zstd") as file:
        file.write(b'{"text": "five"}\n{"text": "six"}\n')
    documents = list(open_corpus(f"{tmp_path}/*").documents())
    assert [(document.key, document.text) for document in documents] == [
        ("a.txt", "café\r\nnext"),
        ("b.jsonl:1", "two"),
        ("c.jsonl.gz:1", "three"),
        ("c.jsonl.gz:2", "four"),
        ("d.jsonl.zst:1", "five"),
        ("d.jsonl.zst:2", "six"),
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "[1].txt").write_text("text")
    assert open_corpus(f"{tmp_path}/[1].txt").n_documents == 1


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
@settings(max_examples=25)
def test_the_fingerprint_is_of_keys_and_texts_only(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    def fingerprint(folder: Path, texts: list[str]) -> str:
        rows = [*texts, "at least one"]
        (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        return open_corpus(f"{folder}/*.jsonl").fingerprint

    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    assert fingerprint(here, texts) == fingerprint(there, texts)
    assert fingerprint(here, [*texts, "more"]) != fingerprint(there, texts)
    assert fingerprint(here, [texts[0] + "x", *texts[1:]]) != fingerprint(there, texts)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    corpus = open_corpus(write_texts(tmp_path, 20), lambda *call: calls.append(call))
    assert calls[-1] == ("reading", corpus.n_bytes, corpus.n_bytes)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def bad_sources(folder: Path) -> dict[str, tuple[str, str]]:
    """What is wrong: (source, a part of the message)."""
    (folder / "notes.md").write_text("text")
    (folder / "blank.txt").write_text("\n")
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "textless.jsonl").write_text('{"text": "fine"}\n\n{"body": "no"}\n')
    (folder / "number.jsonl").write_text('{"text": 5}\n')
    (folder / "list.jsonl").write_text('["text"]\n')
    (folder / "broken.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    parquet.write_table(pa.table({"body": ["a"], "id": [1]}), folder / "body.parquet")
    parquet.write_table(pa.table({"text": [1]}), folder / "number.parquet")
    return {
        "option": ("hf://org/data?splt=a", "has no option splt; the options are config, revision, split"),
        "nothing": ("hf://", "has no name; write hf://org/name"),
        "missing": (f"{folder}/none.txt", "is not a file; give python-stdlib, hf://org/dataset, or a path or glob"),
        "no match": (f"{folder}/*/none*.txt", "matches no file; check the pattern"),
        "folder": (f"{folder}", f"is a folder; name the files in it, for example '{folder}/**/*.txt'"),
        "suffix": (f"{folder}/notes.md", "leaven reads .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet files"),
        "suffix in a glob": (f"{folder}/n*.md", "narrow data.source"),
        "no text": (f"{folder}/blank.txt", "contains no text"),
        "no JSON": (f"{folder}/broken.jsonl", f"{folder}/broken.jsonl:2 is not JSON"),
        "no key": (f"{folder}/textless.jsonl", f"{folder}/textless.jsonl:3 has no text"),
        "no string": (f"{folder}/number.jsonl", "number.jsonl:1 has no text"),
        "no object": (f"{folder}/list.jsonl", "list.jsonl:1 has no text"),
        "no parquet": (f"{folder}/broken.parquet", "cannot be read as parquet"),
        "no column": (f"{folder}/body.parquet", "has no column text, only body, id"),
        "no string column": (f"{folder}/number.parquet", "column text is int64, not string"),
    }


def test_every_bad_source_is_refused_in_one_line_that_says_how_to_mend_it(tmp_path: Path) -> None:
    for what, (source, message) in bad_sources(tmp_path).items():
        with pytest.raises(InputError) as caught:
            open_corpus(source)
        assert message in str(caught.value), what
        assert "\n" not in str(caught.value), what


def test_a_file_that_vanishes_or_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    corpus = open_corpus(write_texts(tmp_path, 3))
    before = (tmp_path / "1" / "1.txt").read_text()
    (tmp_path / "1" / "1.txt").write_text(before.swapcase())
    with pytest.raises(InputError, match=r"1/1\.txt has changed while it was read \(its text differs\)"):
        list(corpus.documents())
    (tmp_path / "1" / "1.txt").unlink()
    with pytest.raises(InputError, match=r"1\.txt cannot be read to its end \(No such file or directory\)"):
        list(corpus.documents())
