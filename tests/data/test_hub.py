"""hf:// data sets and tokenizers in a folder; errors without the Hub or without the extra."""

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tests.errors import refused
from tokenizers import Tokenizer, models

from leaven.data.corpus import Corpus, open_corpora
from leaven.data.hub import fetch_tokenizer
from leaven.data.sources import source_parts
from leaven.data.tokens import prepare
from leaven.errors import InputError
from leaven.recipe.data import Data, DataSource

datasets: Any = pytest.importorskip("datasets")

TEXTS = ["one", None, "zwölf " * 100, " ", *(f"document {number} of the set" for number in range(600))]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same texts written by save_to_disk, with splits, as a folder of files, and in two pieces."""
    root = tmp_path_factory.mktemp("sets")
    small = datasets.Dataset.from_dict({"text": ["of the test split"], "id": [1]})
    whole = datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))})
    whole.save_to_disk(root / "saved")
    datasets.DatasetDict({"train": whole, "test": small}).save_to_disk(root / "splits")
    (root / "files").mkdir()
    whole.to_parquet(root / "files" / "train-00000.parquet")
    small.to_parquet(root / "files" / "test-00000.parquet")
    pieces = [whole.select(range(5)), whole.select(range(5, len(TEXTS)))]
    datasets.concatenate_datasets(pieces).save_to_disk(root / "pieces")
    return root


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def opened(source: str, text: str = "text") -> Corpus:
    return open_corpora([DataSource(source=source, text=text)], 0.0)[0]


@pytest.mark.parametrize("name", ["saved", "splits", "files", "pieces"])
def test_a_data_set_in_a_folder_is_read_row_by_row(folder: Path, name: str) -> None:
    found = {document.key: document.text for document in opened(f"hf://{folder}/{name}").documents()}
    # A key is the split and the row, whichever file it is in.
    texts = [(f"train:{number}", text) for number, text in enumerate(TEXTS, start=1)]
    assert found == {key: text for key, text in texts if text and text.strip()}


@pytest.mark.parametrize("name", ["splits", "files"])
def test_a_split_is_chosen_by_name(folder: Path, name: str) -> None:
    documents = opened(f"hf://{folder}/{name}?split=test").documents()
    assert "".join(document.text for document in documents) == "of the test split"


def test_files_replaced_with_the_same_time_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "set" / "data.jsonl"
    path.parent.mkdir()

    def texts() -> set[str]:
        return {document.text for document in opened(f"hf://{path.parent}").documents()}

    for found in ({"the fox", "a dog"}, {"two cats", "a cow"}, {"one", "two", "three"}):
        path.write_text("\n".join(json.dumps({"text": text}) for text in found))
        os.utime(path, (315_532_800, 315_532_800))
        assert texts() == found
        time.sleep(0.02)  # the clock of a file system has steps of up to 0.01 s
    copies = {file: file.stat().st_mtime_ns for file in (tmp_path / "datasets").rglob("*.arrow")}
    texts()
    assert copies == {file: file.stat().st_mtime_ns for file in copies}


def test_a_data_set_is_tokenised_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.readers.SETTLED_NS", 0)  # the files have just been written
    data = Data(source=f"hf://{folder}/saved", tokens=1)
    first = prepare(data, 300, tmp_path / "cache")
    texts = [text for text in TEXTS if text and text.strip()]
    assert first.train_bytes + first.validation_bytes == sum(len(text.encode()) for text in texts)
    monkeypatch.setattr("leaven.data.hub.HubSplit.rows", None)
    assert prepare(data, 300, tmp_path / "cache").fingerprint == first.fingerprint


def test_bad_data_sets_are_refused_in_one_line(folder: Path) -> None:
    for source, text, message in (
        (f"hf://{folder}/none", "text", "none' cannot be opened: Couldn't find any data file"),
        (f"hf://{folder}/splits?split=dev", "text", "the data set has no split dev, only train, test; check the"),
        (f"hf://{folder}/files?split=dev", "text", "cannot be opened: Unknown split"),
        (f"hf://{folder}/files?config=big", "text", "cannot be opened: BuilderConfig 'big' not found"),
        (f"hf://{folder}/saved?split=test", "text", "split= does not apply to a folder written by save_to_disk; rem"),
        (f"hf://{folder}/saved", "body", f"hf://{folder}/saved:train has no column body, only text, id"),
        (f"hf://{folder}/saved", "id", "has int64 in column id, not string"),
    ):
        with refused(message):
            opened(source, text)


def test_data_files_that_are_left_out_because_of_their_names_are_named(tmp_path: Path) -> None:
    def notes(*names: str, more: str = "") -> tuple[str, ...]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for name in names:
            (folder / name).write_text("{}" if "infos" in name else json.dumps({"text": "a text"}))
        (folder / "README.md").write_text(f"---\nlicense: mit\n{more}---\n")
        (folder / ".cache").mkdir()
        (folder / ".cache" / "old.jsonl").touch()
        if "train.link" in names:
            (folder / "train.link").unlink()
            (away := Path(tempfile.mkdtemp(dir=tmp_path)) / "deep").mkdir()
            (away / ("more.jsonl" if "train.jsonl" in names else "model.pt")).touch()
            (folder / "train.link").symlink_to(away.parent, target_is_directory=True)
        return source_parts(DataSource(source=f"hf://{folder}")).notes

    configs = "configs:\n- config_name: default\n  data_files: train.jsonl\n"
    for names, more in (
        (["a.jsonl", "b.jsonl", "dataset_infos.json"], ""),
        (["train-0.jsonl", "train-1.jsonl", "test.jsonl", "LICENSE.txt", "config.json"], ""),
        (["train.jsonl", "other.jsonl"], configs),
    ):
        assert notes(*names, more=more) == ()
    for names, says in (
        (["train.jsonl", "extra.jsonl", "more.jsonl"], ": 2 data files or links to folders are not read, such as"),
        (["train.jsonl", "notes.md", "extra.csv"], "extra.csv; the package datasets chooses files by name and"),
        (["train.jsonl", "train.link"], "train.link; the"),
    ):
        (note,) = notes(*names)
        assert says in note
    assert "poems.txt; the" in notes("train.txt", "poems.txt")[0]


def test_a_note_says_that_each_line_of_a_text_file_is_a_document(tmp_path: Path) -> None:
    (folder := tmp_path / "set").mkdir()
    (folder / "train.txt").write_text("def f():\n    return 1\n" * 200)
    source = f"hf://{folder}"
    tokens = prepare(Data(source=source, tokens=1), 300, tmp_path / "cache")
    (note,) = [note for note in tokens.notes if "each line of a text file a document, without its line end" in note]
    assert note.endswith("to keep files whole, give the path of the folder without hf://")
    for kept in ("keep_linebreaks: true", "sample_by: document"):
        chosen = f"configs:\n- config_name: default\n  data_files: train.txt\n  {kept}\n"
        (folder / "README.md").write_text(f"---\n{chosen}---\n")
        assert source_parts(DataSource(source=source)).notes == ()


def test_files_of_the_split_that_are_missing_by_the_names_of_others_are_named(tmp_path: Path) -> None:
    (folder := tmp_path / "set").mkdir()
    for name in ("train-00000-of-00003", "train-00002-of-00003", "test-00000-of-00001"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": "a text"}))

    def notes(options: str = "") -> tuple[str, ...]:
        return source_parts(DataSource(source=f"hf://{folder}{options}")).notes

    for options in ("", "?split=train", "?split=train[:50%]", "?split=test%2Btrain", "?split=all"):
        (note,) = notes(options)
        assert f"some are missing, such as {folder}/train-00001-of-00003.jsonl; if a" in note
    assert notes("?split=test") == ()
    with pytest.raises(InputError, match="has an option twice; give it once, such as split=train.extra"):
        notes("?split=train&split=test")
    (folder / "train-00001-of-00003.jsonl").write_text(json.dumps({"text": "a text"}))
    assert notes() == ()
    chosen = "configs:\n- config_name: default\n  data_files: train-0000[02]-*.jsonl\n"
    (folder / "README.md").write_text(f"---\n{chosen}---\n")
    assert source_parts(DataSource(source=f"hf://{folder}")).texts[0].size > 0
    assert notes() == ()


def test_an_arrow_file_with_zeros_at_its_end_is_refused(tmp_path: Path) -> None:
    import pyarrow

    rows = pyarrow.table({"text": [f"document {number}" for number in range(3_000)]})
    files = [tmp_path / "saved" / "data-00000-of-00001.arrow", *(tmp_path / name / "train.arrow" for name in "ab")]
    datasets.Dataset(rows).save_to_disk(tmp_path / "saved")
    for file in files[1:]:
        file.parent.mkdir()
    shutil.copy(files[0], files[1])
    with pyarrow.ipc.new_file(files[2], rows.schema) as writer:  # with a footer, as Feather files have
        writer.write_table(rows)
    for file in files:
        assert opened(f"hf://{file.parent}").n_documents == 3_000
    for file in files[:2]:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))
        with refused(f"{file} has ", " bytes after the end of its Arrow stream", "copy or write the file again"):
            opened(f"hf://{file.parent}")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network, without half a minute of retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_an_unreachable_hub_is_an_error_with_a_suggestion() -> None:
    for give in (opened, fetch_tokenizer):
        with pytest.raises(InputError, match="the Hub cannot be reached, .* or give .* on this machine"):
            give("hf://org/nothing-of-that-name")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the package datasets; run: pip install 'leaven\[hf\]'"):
        opened(f"hf://{folder}/saved")


def test_the_tokenizer_of_a_model_in_a_folder_is_used(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "?": 1, "</s>": 2}, unk_token="?"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = Data(source=f"hf://{folder}/splits?split=test", tokenizer=f"hf://{tmp_path}", tokens=1)
    found = prepare(data, 3, tmp_path / "cache")
    assert (found.vocab_size, found.end_of_text) == (3, 2)
    assert json.loads(found.tokenizer_path.read_text())["model"]["vocab"] == {"one": 0, "?": 1, "</s>": 2}
