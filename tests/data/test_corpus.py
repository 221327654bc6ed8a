import gzip
import json
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from leaven.data.corpus import VALIDATION_SHARE, Corpus, open_corpora
from leaven.recipe.data import DataSource
from leaven.recipe.errors import InputError


def open_corpus(source: str) -> Corpus:
    return open_corpora([DataSource(source=source)], 0.0)[0]


def write_texts(folder: Path, count: int) -> str:
    for number in range(count):
        path = folder / f"{number % 7}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"document {number}\n" * (number % 7 + 1))
    return f"{folder}/**/*.txt"


def sides(corpus: Corpus) -> tuple[list[str], list[str]]:
    documents = list(corpus.documents())
    return [d.key for d in documents if not d.validation], [d.key for d in documents if d.validation]


def test_the_standard_library_is_sorted_and_has_no_tests_or_packages() -> None:
    corpus = open_corpus("python-stdlib")
    keys = [part.key for part in corpus.parts]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py"} <= set(keys)
    folders = {folder for key in keys for folder in key.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "dist-packages"}
    assert 4e6 < corpus.n_bytes < 40e6
    assert open_corpus("python-stdlib") == corpus


def test_the_shipped_text_is_the_same_everywhere() -> None:
    corpus = open_corpus("tiny-shakespeare")
    assert (corpus.n_documents, corpus.fingerprint) == (133, "5d2f43ea656e113ff53b1da1d2618bf5")
    train, validation = sides(corpus)
    assert (len(train), len(validation)) == (127, 6)


def test_the_split_is_near_its_share_and_stable_when_documents_are_added(tmp_path: Path) -> None:
    def split(count: int) -> tuple[list[str], list[str]]:
        lines = (json.dumps({"text": f"document {number}"}) for number in range(count))
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        corpus = open_corpus(str(tmp_path / "a.jsonl"))
        assert corpus.n_documents == count
        return sides(corpus)

    train, validation = split(2_000)
    assert len({*train, *validation}) == len(train) + len(validation) == 2_000
    # Four standard deviations of a binomial.
    tolerance = 4 * (VALIDATION_SHARE * (1 - VALIDATION_SHARE) / 2_000) ** 0.5
    assert abs(len(validation) / 2_000 - VALIDATION_SHARE) < tolerance
    assert split(2_000) == (train, validation)
    more_train, more_validation = split(3_000)
    assert set(validation) <= set(more_validation)
    assert not set(validation) & set(more_train)


@pytest.mark.parametrize("count", [2, 7])
def test_neither_split_of_few_documents_is_empty(tmp_path: Path, count: int) -> None:
    train, validation = sides(open_corpus(write_texts(tmp_path, count)))
    assert train
    assert validation


def test_two_documents_with_low_hashes_are_still_split(tmp_path: Path) -> None:
    # Names whose hashes are below the share of validation.
    names = [f"{n}.txt" for n in range(1_000) if blake2b(f"{n}.txt".encode(), digest_size=8).digest()[0] < 5]
    for name in names[:2]:
        (tmp_path / name).write_text("text")
    train, validation = sides(open_corpus(f"{tmp_path}/*.txt"))
    assert (len(train), len(validation)) == (1, 1)


def test_a_single_document_is_cut_at_a_line_if_it_has_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    text = "".join(f"line {number}\n" for number in range(1_000))
    path.write_text(text)
    train, validation = open_corpus(str(path)).documents()
    assert train.text + validation.text == text
    assert (train.validation, validation.validation) == (False, True)
    assert train.text.endswith("\n")
    assert 0.05 <= len(validation.text) / len(text) < 0.052
    path.write_text("x" * 1_000)
    assert [len(document.text) for document in open_corpus(str(path)).documents()] == [950, 50]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
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
def test_each_row_of_parquet_is_a_document(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "some.parquet"
    texts = [f"row {number}" for number in range(1_000)] + [None, ""]
    parquet.write_table(pa.table({"n": range(1_002), "text": pa.array(texts, kind)}), path)
    corpus = open_corpus(str(path))
    documents = {document.key: document.text for document in corpus.documents()}
    assert corpus.n_documents == 1_000
    assert documents["some.parquet:1000"] == "row 999"


def test_a_glob_may_match_several_formats(tmp_path: Path) -> None:
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


def test_an_existing_file_is_not_read_as_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "[1].txt").write_text("text")
    assert open_corpus(f"{tmp_path}/[1].txt").n_documents == 1


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
@settings(max_examples=10)
def test_the_fingerprint_depends_only_on_keys_and_texts(
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


def bad_sources(folder: Path) -> dict[str, tuple[str, str]]:
    """Return (source, part of the message) by fault."""
    (folder / "notes.md").write_text("text")
    (folder / "blank.txt").write_text("\n")
    parquet.write_table(pa.table({"text": [1]}), folder / "number.parquet")
    return {
        "option": ("hf://org/data?splt=a", "has no option splt; the options are config, revision, split"),
        "nothing": ("hf://", "has no name; write hf://org/name"),
        "missing": (f"{folder}/none.txt", "does not exist; give python-stdlib, tiny-shakespeare, hf://org/dataset,"),
        "no match": (f"{folder}/*/none*.txt", "matches no file; check the pattern"),
        "folder": (f"{folder}", f"is a folder; give a pattern of the files in it, for example '{folder}/**/*.txt'"),
        "suffix": (f"{folder}/notes.md", "is not a .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet file"),
        "suffix in a glob": (f"{folder}/n*.md", "exclude it from data.source"),
        "no text": (f"{folder}/blank.txt", "contains no text"),
        "no string column": (f"{folder}/number.parquet", "has int64 in column text, not string"),
    }


def test_bad_sources_are_refused_in_one_line(tmp_path: Path) -> None:
    for what, (source, message) in bad_sources(tmp_path).items():
        with pytest.raises(InputError) as caught:
            open_corpus(source)
        assert message in str(caught.value), what
        assert "\n" not in str(caught.value), what


def test_a_file_that_changes_or_vanishes_while_it_is_read_is_named(tmp_path: Path) -> None:
    corpus = open_corpus(write_texts(tmp_path, 3))
    before = (tmp_path / "1" / "1.txt").read_text()
    (tmp_path / "1" / "1.txt").write_text(before.swapcase())
    with pytest.raises(InputError, match=r"1/1\.txt changed while it was read \(its text is different\)"):
        list(corpus.documents())
    (tmp_path / "1" / "1.txt").unlink()
    with pytest.raises(InputError, match=r"1\.txt cannot be read to its end \(No such file or directory\)"):
        list(corpus.documents())
