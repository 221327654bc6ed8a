import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import refused
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from leaven.data.corpus import Corpus, Meter, TextDocument, open_corpora
from leaven.data.sources import text_tokens
from leaven.data.tokenizer import END_OF_TEXT, LONGEST_WORD, _refusing, given_tokenizer, pieces, training_sample
from leaven.data.tokens import TokenSet
from leaven.data.tokens import prepare as prepare_data
from leaven.recipe.data import Data, DataSource


def prepare(source: str, tokenizer: str, vocab_size: int, *where: Any, **how: Any) -> TokenSet:
    return prepare_data(Data(source=source, tokenizer=tokenizer, tokens=1), vocab_size, *where, **how)


def open_corpus(source: str) -> Corpus:
    return open_corpora([DataSource(source=source)], 0.0)[0]


WORDS = ["flour", "water", "salt", "leaven", "dough", "crumb", "crust", "oven", "fold", "rest", "ämne", "🍞"]


def write_corpus(folder: Path, documents: int = 60, words: int = 400) -> str:
    chance = random.Random(0)
    for number in range(documents):
        lines = (" ".join(chance.choices(WORDS, k=9)) for _ in range(words // 9))
        (folder / f"{number:03}.txt").write_text(f"# {number}\n" + "\n".join(lines) + END_OF_TEXT)
    return f"{folder}/*.txt"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def prepared(source: str, tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    return prepare(source, "bpe", 300, tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEAVEN_CACHE", str(tmp_path / "default-cache"))
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)


def word_tokenizer(path: Path, size: int, end: str = END_OF_TEXT) -> Path:
    vocabulary = {"[UNK]": 0, end: 1} | {f"word{number}": number for number in range(2, size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(path))
    return path


def test_tokens_decode_to_the_documents_of_each_split(source: str, prepared: TokenSet) -> None:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    for validation, found, n_bytes in (
        (False, prepared.train, prepared.train_bytes),
        (True, prepared.validation, prepared.validation_bytes),
    ):
        texts = [d.text for d in open_corpus(source).documents() if d.validation == validation]
        ids = found[:]
        ends = np.flatnonzero(ids == prepared.end_of_text)
        parts = [part.tolist() for part in np.split(ids, ends + 1)]
        assert [tokenizer.decode(part[:-1], skip_special_tokens=False) for part in parts[:-1]] == texts
        assert parts[-1] == []
        assert n_bytes == sum(len(text.encode()) for text in texts)
        assert ids.dtype == np.uint16
        assert ids.max() < prepared.vocab_size == 300 == tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(END_OF_TEXT) == prepared.end_of_text


@given(text=st.text())
def test_the_tokenizer_loses_no_text(prepared: TokenSet, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert prepared.end_of_text not in ids


def test_the_tokenizer_is_trained_on_the_training_documents_only(tmp_path: Path) -> None:
    source = write_corpus(tmp_path)
    hidden = next(document.key for document in open_corpus(source).documents() if document.validation)
    before = prepare(source, "bpe", 300, tmp_path / "before").tokenizer_path.read_bytes()
    (tmp_path / hidden).write_text("zzqqzzqq " * 20_000)
    assert prepare(source, "bpe", 300, tmp_path / "after").tokenizer_path.read_bytes() == before


def test_a_second_call_reads_the_cache(source: str, prepared: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.shards._build", None)
    again = prepare(source, "bpe", 300, prepared.tokenizer_path.parents[2])
    assert again.fingerprint == prepared.fingerprint
    assert again.tokenizer_path == prepared.tokenizer_path


def test_the_cache_folder_follows_the_environment(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder() -> Path:
        return prepare(source, "bpe", 257).tokenizer_path.parents[1]

    assert folder() == tmp_path / "default-cache" / "tokenizers"
    monkeypatch.delenv("LEAVEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder() == tmp_path / "xdg" / "leaven" / "tokenizers"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder() == tmp_path / "home" / ".cache" / "leaven" / "tokenizers"


def test_progress_reaches_the_total_in_every_stage(source: str, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare(source, "bpe", 300, tmp_path, lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["reading", "tokenizer", "encoding"]
    for stage in ("reading", "tokenizer", "encoding"):
        done = [call[1] for call in calls if call[0] == stage]
        assert done == sorted(done)
        assert done[-1] == open_corpus(source).n_bytes


def test_a_long_document_is_encoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.tokenizer.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("leaven.data.tokenizer.TRAINING_BYTES", 3_000)
    text = "".join(f"line {number} of the text\n" for number in range(2_000)) + "x" * 1_000
    (tmp_path / "long.txt").write_text(text)
    found = prepare(str(tmp_path / "long.txt"), "bpe", 300, tmp_path)
    tokenizer = Tokenizer.from_file(str(found.tokenizer_path))
    assert tokenizer.decode([*found.train[:], *found.validation[:]]) == text
    assert (found.train[:] == found.end_of_text).sum() == 1


TEXTS = ["", "short\n\n words", "a" * 4096, "é" * 4097, "a" * 300_000, " " * 10_000]
TEXTS += ["x " * 9_000 + "b" * 9_000 + "\n" * 9_001 + "c"]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: f"{len(text)} characters")
def test_only_very_long_words_and_gaps_are_cut(text: str) -> None:
    found = list(pieces(TextDocument("key", text, validation=False)))
    assert "".join(piece.text for piece in found) == text
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    runs = [run for piece in found for run in re.findall(r"\S+|\s+", piece.text)]
    assert all(len(run) <= LONGEST_WORD for run in runs)
    if len(text) <= LONGEST_WORD:
        assert len(found) == 1


def test_a_tokenizer_is_trained_on_a_megabyte_of_one_letter(tmp_path: Path) -> None:
    """Uncut, a word of 200 kB takes more than a minute. The time limit is that of the test."""
    (tmp_path / "letter.txt").write_text("a" * 1_000_000)
    tokens = prepare_data(Data(source=str(tmp_path / "letter.txt"), tokens=1), 320, cache=tmp_path / "cache")
    assert Tokenizer.from_file(str(tokens.tokenizer_path)).decode(list(tokens.validation[:3])).strip("a") == ""


def test_a_given_tokenizer_is_used_without_truncation_or_padding(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", 70_000, end="</s>")
    (tmp_path / "a.txt").write_text("word5 word69999 word7 word8 word9 unheard\n" * 100)
    found = prepare(f"{tmp_path}/*.txt", str(path), 70_016, tmp_path)
    assert found.vocab_size == 70_000
    assert found.end_of_text == 1
    assert found.train[:].dtype == np.uint32
    # The file asks for truncation to three tokens and padding to five.
    assert found.train[:7].tolist() == [5, 69_999, 7, 8, 9, 0, 5]
    assert found.validation[-1:].tolist() == [1]


def test_a_tokenizer_without_tokens_for_all_bytes_is_named(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    some = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, END_OF_TEXT: 3}, []))
    some.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_TEXT: 256, "<unk>": 257}
    with_bytes = Tokenizer(models.BPE(fallback, [], unk_token="<unk>", byte_fallback=True))
    some.save(str(tmp_path / "some.json"))
    with_bytes.save(str(tmp_path / "bytes.json"))
    normalized = Tokenizer(models.BPE({byte: id for id, byte in enumerate([END_OF_TEXT, *alphabet])}, []))
    normalized.normalizer = normalizers.ByteLevel()
    normalized.save(str(tmp_path / "normalized.json"))
    (tmp_path / "a.txt").write_text("word5 хлеб\n" * 200)
    for tokenizer, named in (
        (word_tokenizer(tmp_path / "words.json", 99), True),
        (tmp_path / "some.json", True),
        (tmp_path / "bytes.json", False),
        (tmp_path / "normalized.json", False),
        ("bpe", False),
    ):
        for _ in range(2):  # the second time, the tokens are in the cache
            found = prepare(str(tmp_path / "a.txt"), str(tokenizer), 300, tmp_path / "cache")
            assert any(note.startswith("data.tokenizer lacks tokens for some bytes") for note in found.notes) == named


def bad_arguments(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (tokenizer, vocab_size, part of the message)."""
    (folder / "broken.json").write_text('{"model": ')
    (folder / "binary.json").write_bytes(b"\xff\xfe")
    yield "bpe", 256, "vocab_size 256 is too small for bpe; set 257 or more (256 bytes and <|endoftext|>)"
    yield "hf://org/model?split=a", 300, "split is unknown; the options are revision"
    yield f"hf://{folder}/none", 300, "cannot be read (No such file or directory); give bpe, the path of a"
    yield "unigram", 300, "'unigram' cannot be read (No such file or directory); give bpe, the path"
    yield str(folder), 300, "(Is a directory); give bpe, the path"
    yield str(folder / "broken.json"), 300, "is not a tokenizer.json"
    yield str(folder / "binary.json"), 300, "cannot be read"
    big, endless = word_tokenizer(folder / "big.json", 1_500), word_tokenizer(folder / "endless.json", 9, "[END]")
    yield str(big), 1_024, "1,500 tokens, more than vocab_size 1,024; set"
    yield str(endless), 300, "has no end-of-text token; add one of"


def test_a_special_token_ends_documents_before_a_plain_one(source: str, tmp_path: Path) -> None:
    """Gemma's vocabulary has </s>, the HTML tag, before <eos> in the order of usual names."""
    plain = prepare(source, str(word_tokenizer(tmp_path / "plain.json", 300, "</s>")), 300, tmp_path)
    tokenizer = Tokenizer.from_file(str(word_tokenizer(tmp_path / "gemma.json", 300, "</s>")))
    tokenizer.add_tokens(["</s>"])
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "gemma.json"))
    gemma = prepare(source, str(tmp_path / "gemma.json"), 301, tmp_path)
    assert (plain.end_of_text, gemma.end_of_text) == (1, 300)
    ends = [int((found.train[:] == found.end_of_text).sum()) for found in (plain, gemma)]
    assert ends[0] == ends[1] > 0
    assert not (gemma.train[:] == 1).any()


def test_bad_tokenizers_are_refused_before_anything_is_written(source: str, tmp_path: Path) -> None:
    for tokenizer, vocab_size, message in bad_arguments(tmp_path):
        with refused(message):
            prepare(source, tokenizer, vocab_size, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_the_standard_library_is_enough_for_a_vocabulary_of_4096(tmp_path: Path) -> None:
    found = prepare("python-stdlib", "bpe", 4_096, tmp_path)
    assert found.vocab_size == 4_096
    assert len(found.train) > 1_000_000
    assert len(found.validation) > 10_000
    # Four thousand tokens of source code should take at least three bytes each.
    assert found.train_bytes / len(found.train) > 3


def test_a_damaged_tokenizer_is_rebuilt(source: str, prepared: TokenSet, tmp_path: Path) -> None:
    path = prepare(source, "bpe", 300, tmp_path).tokenizer_path
    before = path.read_bytes()
    for harm in (before[:-1], b"", before.replace(b"oven", b"over")):
        path.write_bytes(harm)
        assert prepare(source, "bpe", 300, tmp_path).fingerprint == prepared.fingerprint
        assert path.read_bytes() == before


def test_a_large_share_for_validation_is_named(tmp_path: Path) -> None:
    for name in "ab":  # one of them is held out
        (tmp_path / f"{name}.txt").write_text("some words " * 99)
    (note,) = prepare_data(Data(source=f"{tmp_path}/*.txt", tokens=1), 300, tmp_path / "cache").notes
    assert note.endswith(
        "*.txt: 50% of the text is for validation, because whole documents are held out, and these are few or long"
    )


def test_skipped_documents_are_in_the_notes(tmp_path: Path) -> None:
    rows = [f'{{"text": "word {n}"}}' for n in range(99)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{"]))
    data = Data(source=f"{tmp_path}/a.jsonl", tokens=1, corrupt_share=0.01)
    (note,) = prepare_data(data, 300, tmp_path / "cache").notes
    assert note.startswith("1 of 100 documents")
    assert f"{tmp_path}/a.jsonl:100 is not JSON" in note


def mixed(folder: Path, *weights: float) -> Data:
    """Sources a, b and c of 30 documents, each with its own letter."""
    sources = []
    for name, weight in zip("abc", weights, strict=False):
        (folder / f"{name}.jsonl").write_text("\n".join(f'{{"text": "{name * 400}"}}' for _ in range(30)))
        sources.append({"source": f"{folder}/{name}.jsonl", "weight": weight})
    return Data.model_validate({"source": sources, "tokens": 1_000, "tokenizer": str(letters(folder))})


def letters(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, END_OF_TEXT: 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "letters.json"))
    return folder / "letters.json"


def letters_of(rows: np.ndarray) -> list[str]:
    """Return the letter of each row, apart from end-of-text."""
    found = [set(row.tolist()) - {3} for row in rows]
    assert all(len(one) == 1 for one in found)
    return ["abc"[one.pop()] for one in found]


def test_samples_follow_the_weights_of_the_sources(tmp_path: Path) -> None:
    tokens = prepare_data(mixed(tmp_path, 0.5, 0.3, 0.2), 5, tmp_path)
    stream = tokens.stream(seq_len=50, seed=7)
    rows = stream.batch(0, 2_000)
    found = letters_of(rows)
    assert [found.count(name) for name in "abc"] == [1_000, 600, 400]
    # Every window of a source comes once before any comes again.
    windows = tokens.sources[2].train
    mine = np.array([row for row, name in zip(rows, found, strict=True) if name == "c"])
    per_epoch = (len(windows) - 1) // 50
    first = [tuple(row) for row in mine[:per_epoch]]
    assert sorted(first) == sorted(tuple(windows[i * 50 : i * 50 + 51].tolist()) for i in range(per_epoch))
    assert np.array_equal(stream.batch(123, 7), rows[123:130])
    assert np.array_equal(stream.batch(999, 1)[0], rows[999])


def test_the_order_within_a_source_does_not_depend_on_the_others(tmp_path: Path) -> None:
    def of(letter: str, *weights: float) -> np.ndarray:
        tokens = prepare_data(mixed(tmp_path, *weights), 5, tmp_path)
        rows = tokens.stream(seq_len=20, seed=3).batch(0, 400)
        return rows[[name == letter for name in letters_of(rows)]][:50]

    assert np.array_equal(of("b", 1, 1, 1), of("b", 1, 5, 2))
    assert np.array_equal(of("b", 1, 1, 1), of("b", 2, 1))
    streams = prepare_data(mixed(tmp_path, 1, 1, 1), 5, tmp_path).stream(20, 3).streams
    assert len({stream.seed for stream in streams}) == 3


def test_weights_change_validation_windows_but_not_the_cache(tmp_path: Path) -> None:
    tokens = prepare_data(mixed(tmp_path, 3, 1), 5, tmp_path)
    bins = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")}
    again = prepare_data(mixed(tmp_path, 1, 3), 5, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.bin")} == bins
    assert again.fingerprint == tokens.fingerprint
    assert letters_of(tokens.validation_windows(10, 80)) == ["a"] * 6 + ["b"] * 2
    assert letters_of(again.validation_windows(10, 80)) == ["a"] * 2 + ["b"] * 6
    assert letters_of(again.validation_windows(10, 1)) == ["a", "b"]
    assert len(tokens.train) == sum(len(source.train) for source in tokens.sources)
    assert tokens.epochs(4_000) == {
        f"{tmp_path}/a.jsonl": 3_000 / len(tokens.sources[0].train),
        f"{tmp_path}/b.jsonl": 1_000 / len(tokens.sources[1].train),
    }


def test_windows_of_a_source_that_has_too_few_are_repeated(tmp_path: Path) -> None:
    """Otherwise the validation loss would be that of the other source."""
    tokens = prepare_data(mixed(tmp_path, 3, 1), 5, tmp_path)
    few = len(tokens.sources[1].validation) // 10  # all windows of the second source
    for limit in (40 * few, 400 * few, 10**9):
        found = letters_of(tokens.validation_windows(10, limit))
        assert found.count("a") == pytest.approx(3 * found.count("b"), abs=2)
    assert found.count("a") == (len(tokens.sources[0].validation) - 1) // 10  # none of them is repeated
    assert tokens.uneven_validation(10, 400) is None
    said = tokens.uneven_validation(10, 20) or ""
    assert said.endswith(
        "/a.jsonl has 50% of the 2 validation sequences, but 75% of the training data; set evaluation.tokens = 40"
    )
    assert tokens.uneven_validation(10, 40) is None
    for weights in ((60, 40), (65, 35), (5, 3, 2)):  # what the line proposes is enough
        mixture = prepare_data(mixed(tmp_path, *weights), 5, tmp_path)
        said = mixture.uneven_validation(10, 10) or ""
        assert mixture.uneven_validation(10, int(said.rpartition(" = ")[2])) is None


def test_each_source_gives_the_tokenizer_an_equal_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaven.data.tokenizer.TRAINING_BYTES", 8_000)
    mixed(tmp_path, 1, 1)
    (tmp_path / "b.jsonl").write_text('{"text": "short"}\n{"text": "short"}')
    corpora = [open_corpus(f"{tmp_path}/{name}.jsonl") for name in "ab"]
    sample = list(training_sample(corpora, Meter(None, "", 0)))
    texts = [[document.text for document in corpus.documents() if not document.validation] for corpus in corpora]
    # The first source has 12,000 bytes and a share of 4,000: every third document.
    assert sample == texts[0][::3] + texts[1]


def test_tokens_at_the_end_of_a_short_source_that_fill_no_sequence_are_counted(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"{name}.npy") for name in ("short", "long", "held_out", "more")}
    for count, path in zip((2_047, 900_001, 5_000, 6_000), paths.values(), strict=True):
        np.save(path, (np.arange(count) % 300).astype(np.uint16))
    sources = [{"source": paths["short"], "validation": paths["held_out"]}]
    sources += [{"source": paths["long"], "validation": paths["more"]}]
    data = Data.model_validate({"source": sources, "tokenizer": "bpe", "tokens": 4_096})
    tokens = prepare_data(data, 320)
    assert tokens.left_over(1_024, 5_000) == {paths["short"]: 1_022}
    assert tokens.left_over(1_024, 4_000) == {}  # half of the samples are of this source, less than all its tokens


def test_the_length_of_an_epoch_counts_the_weights_of_sources(tmp_path: Path) -> None:
    for name, count in (("short", 1_000), ("long", 9_000)):
        np.save(tmp_path / f"{name}.npy", np.zeros(count, np.uint16))

    def length(short: float) -> int | None:
        weights = {"short": short, "long": round(1 - short, 1)}
        sources = [{"source": str(tmp_path / f"{name}.npy"), "weight": weight} for name, weight in weights.items()]
        return text_tokens(Data.model_validate({"source": sources, "tokens": 4_096}), 320)

    assert length(0.1) == 10_000  # in proportion to the sizes
    assert length(0.9) == round(1 / (0.81 / 1_000 + 0.01 / 9_000))


@pytest.mark.parametrize(
    ("normalizer", "splitter", "removed"),
    [
        (normalizers.Lowercase(), None, "capitals"),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), None, "accents"),
        (normalizers.NFKC(), None, "full-width letters"),
        (normalizers.Strip(), None, "spaces at the ends of a text"),
        (normalizers.Replace("\n", ""), None, "line ends"),
        (normalizers.Replace(Regex(" +"), " "), None, "repeated spaces"),
        (normalizers.Replace(Regex("[0-9]"), "0"), None, "digits"),
        (None, pre_tokenizers.Whitespace(), "repeated spaces, spaces at the ends of a text, line ends and tabs"),
        # as in Qwen, Llama 2, Gemma and Mistral
        (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), ""),
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, ""),
        (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"), ""),
        (None, pre_tokenizers.Metaspace("▁", "first", split=False), ""),
    ],
)
def test_a_tokenizer_that_changes_the_text_is_named(
    tmp_path: Path, normalizer: Any, splitter: Any, removed: str
) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {END_OF_TEXT: 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("Word 5\n" * 200)
    notes = prepare(str(tmp_path / "a.txt"), str(tmp_path / "t.json"), 300, tmp_path / "cache").notes
    said = [note.partition(": ")[0] for note in notes if "bits per byte are of the changed text" in note]
    assert said == [f"data.tokenizer does not keep {removed}"] * bool(removed)


def test_a_tokenizer_with_dropout_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, END_OF_TEXT: 3}, [("a", "b")], dropout=0.5))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(tmp_path / "t.json"))
    with refused("has BPE dropout, so tokens would be random; set dropout to null in it"):
        given_tokenizer(str(tmp_path / "t.json"), 300)


def test_a_panic_of_the_library_of_tokenizers_is_refused() -> None:
    class PanicException(BaseException):
        pass

    with (
        refused("data.tokenizer cannot encode the text (index out of bounds); give bpe, or another"),
        _refusing("cannot encode the text"),
    ):
        raise PanicException("index out of bounds")
    with pytest.raises(KeyboardInterrupt), _refusing("cannot encode the text"):
        raise KeyboardInterrupt
