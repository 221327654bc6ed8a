"""Token ids of other programs: what training sees of them, and what is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_tokens import word_tokenizer
from tests.data.written import (
    FLAT,
    WITH_DOCUMENTS,
    documents,
    flat,
    hugging_face,
    llm_c,
    megatron,
    nanogpt,
    numpy_file,
)
from tests.errors import refused

from leaven.data.corpus import open_corpora
from leaven.data.file_tokens import FileTokens
from leaven.data.shards import ShardedTokens, TokenRange
from leaven.data.sources import TextSize, text_size
from leaven.data.stream import Mixture, Stream
from leaven.data.token_source import LONGEST_END, DocumentTokens
from leaven.data.tokens import TokenSet
from leaven.data.tokens import prepare as prepare_data
from leaven.errors import InputError
from leaven.recipe.data import Data, DataSource

VOCABULARY, END = 320, 3
TEXTS = documents()


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., TokenSet]:
    def prepared(source: Any, vocab_size: int = VOCABULARY, **data: Any) -> TokenSet:
        return prepare_data(Data(source=source, tokens=1, **data), vocab_size, tmp_path / "cache")

    return prepared


def one(source: str, **options: Any) -> list[dict[str, Any]]:
    return [{"source": source, **options}]


@pytest.mark.parametrize("name", FLAT)
def test_ids_without_documents_are_cut_once(name: str, tmp_path: Path, prepare: Any) -> None:
    found = prepare(FLAT[name](tmp_path / name, TEXTS))
    ids = flat(TEXTS)
    cut = int(len(ids) * 0.95)
    assert found.train[:].tolist() == ids[:cut]
    assert found.validation[:].tolist() == ids[cut:]
    assert (found.vocab_size, found.end_of_text, found.tokenizer_path) == (VOCABULARY, None, None)
    # The same samples as of an array in memory, in an order of their own in each epoch.
    wanted = Stream(np.array(ids[:cut]), 16, 5)
    assert np.array_equal(found.stream(16, 5).batch(0, 700), wanted.batch(0, 700))
    assert text_size(DataSource(source=str(tmp_path / name))) == TextSize(ids=len(ids))


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_documents_are_not_cut(name: str, tmp_path: Path, prepare: Any) -> None:
    found = prepare(WITH_DOCUMENTS[name](tmp_path / name, TEXTS))
    ends = np.cumsum([len(text) for text in TEXTS])
    held_out = next(number for number, end in enumerate(ends, start=1) if end >= int(ends[-1] * 0.95))
    assert found.train[:].tolist() == flat(TEXTS[:held_out])
    assert found.validation[:].tolist() == flat(TEXTS[held_out:])
    assert not (tmp_path / "cache" / "tokens").exists()


def test_an_end_of_text_token_marks_documents_of_flat_files(tmp_path: Path, prepare: Any) -> None:
    texts = documents(end_of_text=END)
    found = prepare(nanogpt(tmp_path / "a.bin", texts), end_of_text=END)
    assert found.end_of_text == END
    assert found.validation[:].tolist() in [flat(texts[number:]) for number in range(55, 60)]
    assert found.train[-1 + len(found.train) :].tolist() == [END]


def test_a_document_that_ends_at_the_cut_is_the_last_of_training(tmp_path: Path, prepare: Any) -> None:
    texts = [[*[10 + number] * 49, END] for number in range(40)]
    assert len(prepare(nanogpt(tmp_path / "a.bin", texts), end_of_text=END).train) == 1_900


@pytest.mark.parametrize("name", WITH_DOCUMENTS)
def test_a_missing_end_of_text_token_is_added(name: str, tmp_path: Path, prepare: Any) -> None:
    written, bare = documents(end_of_text=END), documents()
    (tmp_path / "with").mkdir()
    found = [
        prepare(WITH_DOCUMENTS[name](tmp_path / folder / name, texts), end_of_text=END)
        for folder, texts in (("", bare), ("with", written))
    ]
    # The lengths differ, so a cut may fall elsewhere.
    assert [[*each.train[:], *each.validation[:]] for each in found] == [flat(written)] * 2
    assert [number for number, each in enumerate(found) for note in each.notes if "is added" in note] == [0]
    ends = np.flatnonzero(found[0].train[:] == END)
    assert np.array_equal(found[0].train[: ends[4] + 1], flat(written[:5]))


def test_an_end_of_text_token_within_a_document_is_not_its_end(tmp_path: Path, prepare: Any) -> None:
    bare = documents()
    bare[0][1] = END
    found = prepare(megatron(tmp_path / "a.bin", bare), end_of_text=END)
    assert [*found.train[:], *found.validation[:]] == flat([[*text, END] for text in bare])
    assert any(f"{len(bare)} documents have 1 end-of-text tokens; id 3 is added" in note for note in found.notes)
    most = [[*text, END] for text in documents()]
    del most[5][-1], most[9][-1]
    found = prepare(megatron(tmp_path / "b.bin", most), end_of_text=END)
    assert [*found.train[:], *found.validation[:]] == flat(most)
    note = f"{len(most)} documents have {len(most) - 2} end-of-text tokens (id 3); none is added"
    assert any(note in each for each in found.notes)


def test_empty_documents_do_not_count(tmp_path: Path, prepare: Any) -> None:
    found = prepare(megatron(tmp_path / "a.bin", [[], *TEXTS[:9], [], [], *TEXTS[9:], []]), end_of_text=END)
    assert [*found.train[:], *found.validation[:]] == flat([[*text, END] for text in TEXTS])


@given(data=st.data())
def test_added_tokens_are_at_the_ends_of_documents(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=8))
    rest = data.draw(st.lists(st.integers(0, 9), max_size=6))
    ids = np.array([*flat(texts), *rest], np.uint8)
    shards = ShardedTokens([ids[:7], ids[7:]])
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    wanted = [*flat([[*text, 70_000] for text in texts]), *rest]
    found = DocumentTokens(shards, ends, 70_000)
    start = data.draw(st.integers(0, len(wanted)))
    stop = data.draw(st.integers(start, len(wanted)))
    assert len(found) == len(wanted)
    assert found[start:stop].tolist() == wanted[start:stop]


def test_every_stretch_of_a_file_is_validated(tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.token_source.STRETCH_TOKENS", 5_000)
    texts = documents(count=720)
    source = megatron(tmp_path / "a.bin", texts)
    found = prepare(source)
    ids = np.array(flat(texts))
    place = {tuple(text): number for number, text in enumerate(texts)}
    train, validation = found.train[:].tolist(), found.validation[:].tolist()
    held_out: list[int] = []
    left = list(texts)
    while validation:
        text = next(text for text in left if text == validation[: len(text)])
        held_out.append(place[tuple(text)])
        left.remove(text)
        validation = validation[len(text) :]
    assert train == flat(left)  # every document is whole, in one of the splits, in order
    starts = np.cumsum([0, *(len(text) for text in texts)])[held_out]
    stretches = len(ids) // 5_000
    assert stretches > 5
    assert set((starts * stretches // len(ids)).tolist()) == set(range(stretches))
    assert 0.01 < len(found.validation) / len(ids) < 0.1


def test_a_document_longer_than_the_held_out_part_is_cut(tmp_path: Path, prepare: Any) -> None:
    found = prepare(megatron(tmp_path / "a.bin", [flat(TEXTS)]))
    assert len(found.validation) == pytest.approx(0.05 * len(flat(TEXTS)), abs=1)


def test_the_files_are_read_where_they_are(tmp_path: Path, prepare: Any) -> None:
    for source in (nanogpt(tmp_path / "a.bin", TEXTS), numpy_file(tmp_path / "a.npy", TEXTS)):
        shard = prepare(source).train.shards[0]
        assert isinstance(shard, TokenRange)
        assert isinstance(shard.tokens, FileTokens)


@pytest.mark.parametrize("blocks", [None, "", "00"])
@pytest.mark.parametrize("write", [nanogpt, numpy_file, llm_c, megatron])
def test_a_file_that_rots_after_it_was_read_is_refused(
    tmp_path: Path, prepare: Any, write: Callable[..., str], blocks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.data.token_files.file_stamp", lambda path: [1])  # rot changes no time stamp
    file = tmp_path / ("a.npy" if write is numpy_file else "a.bin")
    source = write(file, TEXTS)
    prepare(source)
    if blocks is not None:  # the survey was cached by an older version, or its checksums are damaged
        (cached,) = (tmp_path / "cache" / "surveys").glob("*.json")
        document = json.loads(cached.read_text())
        for part in document["parts"].values():
            part["survey"]["blocks"] = blocks
        cached.write_text(json.dumps(document))
    found = prepare(source)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 & ~1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InputError, match=r"a.* is damaged: its bytes .* are not those .*; restore it"):
        found.train[:]


def test_a_file_that_is_overwritten_while_it_is_read_is_refused(tmp_path: Path, prepare: Any) -> None:
    source, file = numpy_file(tmp_path / "a.npy", TEXTS), tmp_path / "a.npy"
    found = prepare(source)
    before = found.train[:].tolist()
    raw = bytearray(file.read_bytes())
    os.utime(file)
    assert found.train[:].tolist() == before  # only its time has changed
    raw[len(raw) // 2 & ~1] ^= 1
    with file.open("r+b") as content:
        content.write(raw)
    with pytest.raises(InputError, match=r"a.npy is damaged: its bytes .* are not those .*; restore it"):
        found.train[:]


def test_validation_can_have_files_of_its_own(tmp_path: Path, prepare: Any) -> None:
    source = one(nanogpt(tmp_path / "train.bin", TEXTS), validation=hugging_face(tmp_path / "val", TEXTS[:7]))
    found = prepare(source)
    assert found.train[:].tolist() == flat(TEXTS)
    assert found.validation[:].tolist() == flat(TEXTS[:7])
    other = prepare(one(source[0]["source"], validation=nanogpt(tmp_path / "val.bin", TEXTS[:8])))
    assert found.fingerprint != other.fingerprint


def test_files_that_are_trained_on_cannot_be_validated_on(tmp_path: Path, prepare: Any) -> None:
    for name, texts in (("train.bin", TEXTS), ("train2.bin", TEXTS[:9]), ("copy.bin", TEXTS[:9])):
        nanogpt(tmp_path / name, texts)
    source = f"{tmp_path}/train*.bin"
    for validation in ("train.bin", "*2.bin"):
        with refused("is found twice, by data.source", f"and validation of '{source}'"):
            prepare(one(source, validation=f"{tmp_path}/{validation}"))
    same = "have the same token ids, and leaven would validate on tokens that it trains on"
    with refused("train2.bin (for training) and", f"copy.bin (for validation) {same}", "give other files"):
        prepare(one(source, validation=f"{tmp_path}/copy.bin"))
    (tmp_path / "link.bin").symlink_to("train2.bin")
    with refused("train2.bin", "link.bin are the same file"):
        prepare(one(f"{tmp_path}/train2.bin", validation=f"{tmp_path}/link.bin"))
    trained = {"source": f"{tmp_path}/train.bin", "validation": nanogpt(tmp_path / "val.bin", TEXTS[:8])}
    with refused(f"copy.bin (for validation) {same}"):
        prepare([trained, *one(f"{tmp_path}/link.bin", validation=f"{tmp_path}/copy.bin")])
    (tmp_path / "again.bin").hardlink_to(tmp_path / "train.bin")
    for again in ("again.bin", "copy2.bin"):
        nanogpt(tmp_path / "copy2.bin", TEXTS)
        with refused(f"{again} (a part of it for validation)", f"train.bin (for training) {same}"):
            prepare([*one(f"{tmp_path}/{again}"), trained])
    # A link to a file without a link to its index has other ends of documents.
    (tmp_path / "ids.bin").symlink_to(megatron(tmp_path / "indexed.bin", TEXTS[:9]))
    with refused(f"{tmp_path}/indexed.bin and {tmp_path}/ids.bin are the same file, found twice, by data.source"):
        prepare(one(f"{tmp_path}/indexed.bin", validation=f"{tmp_path}/ids.bin"))
    set_ = hugging_face(tmp_path / "set", TEXTS)
    (tmp_path / "sets").symlink_to(tmp_path)
    with refused("/set:train (for training)", f"sets/set:train (for validation) {same}"):
        prepare(one(set_, validation=f"hf://{tmp_path}/sets/set"))
    for again in ("copy.bin", "link.bin"):  # the same part is held out
        assert len(prepare([*one(f"{tmp_path}/train*.bin"), *one(f"{tmp_path}/{again}")]).sources) == 2
    for name, texts in (("a", TEXTS), ("b", TEXTS[:7])):  # files without ids have none in common
        (tmp_path / name).mkdir()
        numpy_file(tmp_path / name / "ids.npy", texts)
        numpy_file(tmp_path / name / "none.npy", [])
    found = prepare(one(f"{tmp_path}/a/*.npy", validation=f"{tmp_path}/b/*.npy"))
    assert found.validation[:].tolist() == flat(TEXTS[:7])


def test_sources_can_share_validation_and_files_that_all_of_them_train_on(tmp_path: Path, prepare: Any) -> None:
    a, b, val = (
        nanogpt(tmp_path / f"{name}.bin", texts)
        for name, texts in (("a", TEXTS[:9]), ("b", TEXTS[9:30]), ("val", TEXTS[30:]))
    )
    both = [{"source": a, "validation": val}, {"source": b, "validation": val}]
    assert [part.validation[:].tolist() for part in prepare(both).sources] == [flat(TEXTS[30:])] * 2
    both[1]["source"] = f"{tmp_path}/[ab].bin"
    assert prepare(both).sources[1].train[:].tolist() == flat(TEXTS[:30])
    both[1]["validation"] = a
    with refused("a.bin is found twice, by data.source", "and validation of"):
        prepare(both)


def test_a_file_that_is_found_twice_is_refused(tmp_path: Path, prepare: Any) -> None:
    (tmp_path / "v1").mkdir()
    numpy_file(tmp_path / "v1" / "a.npy", TEXTS)
    (tmp_path / "v1" / "latest.npy").symlink_to("a.npy")
    with refused("v1/a.npy and", "v1/latest.npy are the same file", "change the patterns"):
        prepare(f"{tmp_path}/**/*.npy")
    assert len(prepare(f"{tmp_path}/v1/latest.npy").train) > 0


def test_a_file_without_the_index_that_others_have_is_refused(tmp_path: Path, prepare: Any) -> None:
    """Its ids could have another dtype, and the ends of documents of all files would be unknown."""
    for name in ("a", "b"):
        megatron(tmp_path / f"{name}.bin", TEXTS)
    index = (tmp_path / "b.idx").rename(tmp_path / "elsewhere")
    with refused(f"{tmp_path}/b.bin has no .idx of Megatron-LM, unlike other files; bring the .idx back"):
        prepare(one(f"{tmp_path}/?.bin", dtype="uint16"))
    index.rename(tmp_path / "b.idx")
    assert prepare(one(f"{tmp_path}/?.bin", dtype="uint16"))


def test_rows_of_one_length_are_blocks_not_documents(tmp_path: Path, prepare: Any) -> None:
    ids = flat(TEXTS)
    blocks = [ids[first : first + 64] for first in range(0, len(ids), 64)]
    found = prepare(one(hugging_face(tmp_path / "set", blocks, "ids"), text="ids"))
    assert len(found.train) == int(len(ids) * 0.95)
    assert [*found.train[:], *found.validation[:]] == ids


def test_sources_are_mixed_by_weight_with_text(tmp_path: Path, prepare: Any) -> None:
    tokenizer = str(word_tokenizer(tmp_path / "tokenizer.json", 300))
    (tmp_path / "a.jsonl").write_text('{"text": "word5 word6 word7 word8 word9"}\n' * 400)
    ids = [1, *range(10, 300)] * 9
    source = [
        {"source": str(tmp_path / "a.jsonl"), "weight": 0.25},
        {"source": nanogpt(tmp_path / "a.bin", [ids]), "weight": 0.75},
    ]
    found = prepare(source, tokenizer=tokenizer)
    assert (found.end_of_text, found.vocab_size) == (1, 300)
    stream = found.stream(8, 0)
    assert isinstance(stream, Mixture)
    batch = stream.batch(0, 400)
    of_text = (batch < 10).all(1)
    assert of_text.sum() == 100
    assert abs(of_text[:200].sum() - 50) <= 1
    assert np.array_equal(stream.batch(123, 50), batch[123:173])  # by number
    assert found.epochs(1_000)[source[1]["source"]] == pytest.approx(750 / len(found.sources[1].train))


def test_the_fingerprint_changes_with_a_single_id(tmp_path: Path, prepare: Any) -> None:
    def fingerprint(texts: list[list[int]], **data: Any) -> str:
        return str(prepare(megatron(tmp_path / "a.bin", texts), **data).fingerprint)

    first = fingerprint(TEXTS)
    changed = [list(text) for text in TEXTS]
    changed[3][7] += 1
    moved = [*TEXTS[:2], [*TEXTS[2], TEXTS[3][0]], TEXTS[3][1:], *TEXTS[4:]]  # only the index differs
    assert len({first, fingerprint(changed), fingerprint(moved), fingerprint(TEXTS, end_of_text=END)}) == 4
    assert fingerprint(TEXTS) == first


def test_unchanged_files_are_not_read_again(tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.readers.SETTLED_NS", -(10**12))
    source = megatron(tmp_path / "a.bin", TEXTS)
    first = prepare(source)
    with monkeypatch.context() as patch:
        patch.setattr("leaven.data.token_source._survey", None)
        assert prepare(source).fingerprint == first.fingerprint
        with refused("token id 299", "0 to 250"):
            prepare(source, vocab_size=251)  # checked against another vocabulary
    changed = [[11, *TEXTS[0][1:]], *TEXTS[1:]]
    megatron(tmp_path / "a.bin", changed)
    second = prepare(source)
    index = tmp_path / "a.idx"
    index.write_bytes(Path(megatron(tmp_path / "b.bin", [flat(changed)])).with_suffix(".idx").read_bytes())
    assert len({first.fingerprint, second.fingerprint, prepare(source).fingerprint}) == 3


def test_files_that_end_with_one_id_are_named(tmp_path: Path, prepare: Any) -> None:
    """A program that was stopped while it filled a memory map of a fixed size leaves zeros at its end."""
    ids = np.random.default_rng(0).integers(10, 300, 10_000).astype(np.uint16)

    def write(name: str, size: int, *more: int) -> str:
        return _array(tmp_path / name, np.concatenate([ids, np.zeros(size, np.uint16), more]).astype(np.uint16))

    def notes(size: int, *more: int, **data: Any) -> tuple[str, ...]:
        return prepare(one(write("a.npy", size, *more)), **data).notes  # type: ignore[no-any-return]

    def line(source: str, counts: str) -> str:
        return (
            f"{tmp_path}/{source}: {counts} files end with more than 1,024 equal token ids, such as {tmp_path}/a.npy"
            ", which ends with 0; if a program was stopped while it wrote the files, write them again"
        )

    for size in (LONGEST_END + 1, 10_000):
        assert notes(size) == (line("a.npy", "1 of 1"),)
    assert notes(10_000, 5) == notes(500) == notes(LONGEST_END) == ()  # such as padding
    assert notes(10_000, end_of_text=0) == ()  # padding with the end-of-text token to a whole sequence
    write("a.npy", 10_000)
    for name, size in (("b.npy", 0), ("c.npy", 1_500), ("d.npy", 3_000)):
        write(name, size)
    assert prepare(one(f"{tmp_path}/?.npy")).notes == (line("?.npy", "3 of 4"),)
    own = one(f"{tmp_path}/b.npy", validation=f"{tmp_path}/a.npy")
    assert prepare(own).notes == (line("a.npy", "1 of 1"),)


def test_new_keys_do_not_change_older_recipes() -> None:
    """Results of checks and studies are found by a hash of the recipe."""
    keys = {"source", "tokenizer", "tokens", "seed", "documents", "corrupt_share"}
    assert Data(tokens=1).model_dump().keys() == keys
    (source,) = Data(source=one("a.txt"), tokens=1).model_dump()["source"]
    assert source == {"source": "a.txt", "weight": 1.0, "text": "text"}
    full = Data(source=one("a.bin", dtype="uint32", validation="b.bin"), tokens=1, end_of_text=0)
    assert Data.model_validate(full.model_dump()) == full


def _array(path: Path, ids: np.ndarray) -> str:
    np.save(path, ids)
    return str(path)


def _changed(path: Path, write: Callable[[bytes], bytes]) -> str:
    path.write_bytes(write(path.read_bytes()))
    return str(path)


def _index(path: Path, write: Callable[[bytes], bytes], **how: Any) -> str:
    megatron(path, TEXTS, **how)
    _changed(path.with_suffix(".idx"), write)
    return str(path)


BAD: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "an array of floats": (lambda p: _array(p / "a.npy", np.zeros(9)), ("float64", "integers with one dimension")),
    "a matrix": (lambda p: _array(p / "a.npy", np.zeros((3, 3), np.uint16)), ("uint16", "with one dimension")),
    "short index": (
        lambda p: _index(p / "a.bin", lambda raw: raw[:-8]),
        ("a.bin has an index a.idx that does not fit it",),
    ),
    "empty index": (lambda p: _index(p / "a.bin", lambda raw: b""), ("a.idx", "unknown magic number")),
    "magic of index": (lambda p: _index(p / "a.bin", lambda raw: b"TNTIDX\0\0\0" + raw[9:]), ("magic number",)),
    "version of index": (lambda p: _index(p / "a.bin", lambda raw: raw[:9] + b"\2" + raw[10:]), ("version 2",)),
    "floats": (lambda p: _index(p / "a.bin", lambda raw: raw[:17] + b"\7" + raw[18:]), ("dtype code 7",)),
    "pointers": (lambda p: _index(p / "a.bin", lambda raw: raw[:-700] + b"\5" + raw[-699:]), ("not fit it",)),
    "link of an index": (
        lambda p: [(p / "a.idx").symlink_to("none"), nanogpt(p / "a.bin", TEXTS)][1],  # type: ignore[func-returns-value]
        ("a.bin cannot be read (No such file",),
    ),
    "truncated ids": (
        lambda p: _changed(Path(megatron(p / "a.bin", TEXTS)), lambda raw: raw[:-2]),
        ("a.bin has an index a.idx that does not fit it; copy both files again",),
    ),
    "llm.c's questions": (lambda p: llm_c(p / "a.bin", TEXTS, (20240522, 1)), ("unknown magic number 20240522",)),
    "llm.c's version": (lambda p: llm_c(p / "a.bin", TEXTS, (20240520, 2)), ("version 2", "of version 1")),
    "llm.c truncated": (
        lambda p: _changed(Path(llm_c(p / "a.bin", TEXTS)), lambda raw: raw[:-2]),
        ("a.bin has", "its header says", "copy the whole file"),
    ),
    "half an id": (
        lambda p: _changed(Path(nanogpt(p / "a.bin", TEXTS)), lambda raw: raw[:-1]),
        ("not a whole number of uint16 ids",),
    ),
    "32 bits": (lambda p: nanogpt(p / "a.bin", TEXTS, "<u4"), ('dtype = "uint32"',)),
    "64 bits": (lambda p: nanogpt(p / "a.bin", TEXTS, "<i8"), ("does not contain uint16 ids", 'dtype = "int64"')),
    "empty": (lambda p: nanogpt(p / "a.bin", []), ("a.bin is empty",)),
    "large id": (lambda p: nanogpt(p / "a.bin", [*TEXTS, [320]]), ("token id 320", "0 to 319", "vocab_size")),
    "negative id": (lambda p: megatron(p / "a.bin", [*TEXTS, [-1]], code=4), ("token id -1",)),
    "no header": (
        lambda p: str(Path(nanogpt(p / "a.bin", TEXTS)).rename(p / "a.npy")),
        ("is not a numpy file", "rename it to .bin"),
    ),
    "truncated numpy": (
        lambda p: _changed(Path(numpy_file(p / "a.npy", TEXTS)), lambda raw: raw[:-4]),
        ("a.npy cannot be read",),
    ),
    "two arrays in one numpy file": (
        lambda p: _changed(Path(numpy_file(p / "a.npy", TEXTS)), lambda raw: raw + raw),
        ("a.npy has", "its header says", "each array to a file of its own"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_and_unknown_files_are_refused(name: str, tmp_path: Path, prepare: Any) -> None:
    write, parts = BAD[name]
    source = write(tmp_path)
    with refused(*parts):
        prepare(source)


IDS = [text[:30] for text in TEXTS]
SETS: dict[str, tuple[Any, str]] = {
    "no rows": ([], "has no rows; choose another split"),
    "no ids": ([[], []], "contains no tokens; give files"),
    "null rows": ([[], None], "contains no tokens; give files"),
    "numbers": (IDS[0], "has int32 in column input_ids, not strings (text) or lists of integers (token ids)"),
    "floats": ([[0.5]] * 9, "has list<item: double> in column input_ids, not strings"),
    "text": ([["a"]] * 9, "has list<item: string> in column input_ids, not strings"),
    "pairs": ([IDS[:2]] * 9, "has list<item: list<item: int32>> in column input_ids, not"),
    "labels": ([[-100, 5]] * 99, "set:train has the token id -100"),
}


@pytest.mark.parametrize("name", SETS)
def test_data_sets_without_ids_are_refused(name: str, tmp_path: Path, prepare: Any) -> None:
    import datasets

    column, message = SETS[name]
    datasets.Dataset.from_dict({"input_ids": column}).save_to_disk(tmp_path / "set")
    with refused(message):
        prepare(f"hf://{tmp_path}/set")
    with refused("is a folder; give a pattern", f"or hf://{tmp_path}/set for a data set"):
        prepare(f"{tmp_path}/set")


def test_a_split_without_rows_does_not_hide_the_others(tmp_path: Path, prepare: Any) -> None:
    import datasets

    splits = {"train": {"input_ids": TEXTS}, "test": {"input_ids": []}}
    found = datasets.DatasetDict({name: datasets.Dataset.from_dict(split) for name, split in splits.items()})
    found.save_to_disk(tmp_path / "set")
    assert len(prepare(f"hf://{tmp_path}/set").train) > 3_000
    with refused("the split test of data.source", "has no rows"):
        prepare(f"hf://{tmp_path}/set?split=test")
    (tmp_path / "files").mkdir()
    found["train"].to_parquet(tmp_path / "files" / "train.parquet")
    assert prepare(f"hf://{tmp_path}/files").train[:9].tolist() == TEXTS[0][:9]
    with refused("lists of integers (token ids); to train on lists of token ids in parquet files, give their folder"):
        prepare(one(f"{tmp_path}/files/*.parquet", text="input_ids"))


def test_rows_with_padding_or_nulls_are_refused(tmp_path: Path, prepare: Any) -> None:
    import datasets

    padded = {"input_ids": [[5, 6, 0, 0], [7, 8, 9, 9]], "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]]}
    datasets.Dataset.from_dict(padded).save_to_disk(tmp_path / "padded")
    with refused("has a column attention_mask with values other than 1", "padding=False"):
        prepare(f"hf://{tmp_path}/padded")
    datasets.Dataset.from_dict({"input_ids": [[5, None]]}).save_to_disk(tmp_path / "nulls")
    with refused("has nulls among its token ids"):
        prepare(f"hf://{tmp_path}/nulls")


MASKS: dict[str, Any] = {
    "booleans": [True, False],
    "numbers": 1,
    "text": ["1", "1"],
    "null": [1, None],
    "null row": None,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_another_kind(name: str, tmp_path: Path, prepare: Any) -> None:
    import datasets

    mask = MASKS[name]
    ids = [[5, 6]] * 20
    masks = [mask] * 20 if mask is not None else [[1, 1], None] * 10
    datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": masks}).save_to_disk(tmp_path / "bad")
    with refused("bad:train has a column attention_mask with values other than 1", "or remove the column"):
        prepare(f"hf://{tmp_path}/bad")
    datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": [[True] * 2] * 20}).save_to_disk(tmp_path / "ok")
    assert len(prepare(f"hf://{tmp_path}/ok").train) == 38


def test_columns_that_choose_tokens_to_train_on_are_named(tmp_path: Path, prepare: Any) -> None:
    import datasets

    masked = {"input_ids": [[5, 6]] * 20, "labels": [[-100, 6]] * 20, "loss_mask": [[0, 1]] * 20}
    datasets.Dataset.from_dict(masked).save_to_disk(tmp_path / "masked")
    (note,) = prepare(f"hf://{tmp_path}/masked").notes
    assert note.endswith("columns not read: labels and loss_mask; all tokens are trained")


def test_an_arrow_file_that_is_truncated_while_it_is_read_gives_one_line(tmp_path: Path, prepare: Any) -> None:
    import datasets

    for column, rows in (("input_ids", TEXTS), ("text", [f"text {number} " * 99 for number in range(600)])):
        datasets.Dataset.from_dict({column: rows}).save_to_disk(tmp_path / column, num_shards=2)
    (file,) = (tmp_path / "input_ids").glob("*-00001-of-*.arrow")
    tokens = prepare(f"hf://{tmp_path}/input_ids").train
    os.truncate(file, 4096)
    assert tokens[:20].tolist() == TEXTS[0][:20]  # in the other file
    with refused(f"{file} has been truncated to 4,096 of "):
        tokens[:]
    (file,) = (tmp_path / "text").glob("*-00001-of-*.arrow")
    (corpus,) = open_corpora([DataSource(source=f"hf://{tmp_path}/text")], 0.0)
    read = corpus.documents()
    next(read)
    os.truncate(file, 4096)
    with refused(f"{file} has been truncated to 4,096 of "):
        list(read)


def test_an_arrow_file_that_rots_after_it_was_read_is_refused(
    tmp_path: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": TEXTS}).save_to_disk(tmp_path / "ids", num_shards=2)
    (file,) = (tmp_path / "ids").glob("*-00001-of-*.arrow")
    raw = bytearray(file.read_bytes())
    before = prepare(f"hf://{tmp_path}/ids").fingerprint
    raw[len(raw) // 2 & ~7] ^= 1
    file.write_bytes(raw)
    assert prepare(f"hf://{tmp_path}/ids").fingerprint != before  # a changed file is read again
    monkeypatch.setattr("leaven.data.hub.file_stamp", lambda path: [1])  # rot changes no time stamp
    prepare(f"hf://{tmp_path}/ids")
    raw[len(raw) // 2 & ~7] ^= 2
    file.write_bytes(raw)
    with refused(f"{file}: token ids 0 to ", "are not those that were written; restore it"):
        prepare(f"hf://{tmp_path}/ids").train[:]


def test_keys_that_do_not_fit_are_refused(tmp_path: Path, prepare: Any) -> None:
    ids, long = nanogpt(tmp_path / "a.bin", TEXTS), megatron(tmp_path / "b.bin", TEXTS, code=4)
    (tmp_path / "a.txt").write_text("text of a document\n" * 200)
    text = str(tmp_path / "a.txt")
    with refused("a.bin", "dtype", "too large for uint16", 'dtype = "uint32"'):
        prepare(ids, vocab_size=128_256)
    with refused("b.bin has ids of int32, not of uint16; remove dtype"):
        prepare(one(long, dtype="uint16"))
    with refused("dtype is for token ids", "a.txt"):
        prepare(one(text, dtype="uint16"))
    with refused("validation", "a.txt' is text"):
        prepare(one(ids, validation=text))
    with refused("validation is for token ids"):
        prepare(one(text, validation=ids))
    with refused("has token ids, but with data.tokenizer = 'bpe' the text of the other"):
        prepare([{"source": text}, {"source": ids}])
    with refused("end_of_text is for token ids"):
        prepare(text, end_of_text=1)
    with refused("end_of_text 320 is not below vocab_size 320"):
        prepare(ids, end_of_text=320)
    with refused("a.bin' does not contain the end-of-text token 3"):
        prepare(ids, end_of_text=END)
    with refused("matches text and token ids", "two sources"):
        prepare(f"{tmp_path}/a.[bt]*")
    with refused(".idx is not a", ".bin"):
        prepare(f"{tmp_path}/*.idx")
    small = str(word_tokenizer(tmp_path / "tokenizer.json", 280))
    with refused("a.bin has the token id 299", "0 to 279", "data.tokenizer"):
        prepare(ids, tokenizer=small)
    np.arange(1, 101, dtype="<u2").tofile(tmp_path / "even.bin")
    with refused("even.bin has the token id", "or set dtype, now uint32, to the dtype of the file"):
        prepare(one(f"{tmp_path}/even.bin", dtype="uint32"))


def test_32_bit_files_are_read_with_their_dtype(tmp_path: Path, prepare: Any) -> None:
    texts = [[token * 400 for token in text] for text in TEXTS]
    found = prepare(one(nanogpt(tmp_path / "a.bin", texts, "<u4"), dtype="uint32"), vocab_size=128_256)
    assert [*found.train[:], *found.validation[:]] == flat(texts)
    assert not found.notes
    assert "read as uint16" in prepare(nanogpt(tmp_path / "b.bin", TEXTS)).notes[0]


def test_text_has_fewer_tokens_with_a_larger_vocabulary() -> None:
    """Counts of tinyshakespeare (1.1 MB) by BPEs that were trained on it, with the package tokenizers."""
    counted = {256: 1_115_394, 512: 575_345, 1_024: 459_792, 4_096: 344_092, 16_384: 302_976}
    text = TextSize(1_115_394)
    for vocab_size, count in counted.items():
        assert text.tokens(vocab_size) == pytest.approx(count, rel=0.1)
    sizes = [text.tokens(size) for size in (100, 256, 300, 600, 5_000, 40_000, 10**6)]
    assert sizes == sorted(sizes, reverse=True)
