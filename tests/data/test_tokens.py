import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from leaven.data import tokens
from leaven.data.corpus import open_corpus
from leaven.data.tokens import END_OF_TEXT, ShardedTokens, TokenSet, prepare
from leaven.recipe.errors import InputError

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


def test_the_vocabulary_is_exactly_what_was_asked_for(prepared: TokenSet) -> None:
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    assert prepared.vocab_size == 300 == tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(END_OF_TEXT) == prepared.end_of_text
    assert prepared.train[:].max() < 300


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
    monkeypatch.setattr(tokens, "_build", None)
    again = prepare(source, "bpe", 300, prepared.tokenizer_path.parents[2])
    assert again.fingerprint == prepared.fingerprint
    assert again.tokenizer_path == prepared.tokenizer_path


def test_the_fingerprint_is_of_the_content(source: str, prepared: TokenSet, tmp_path: Path) -> None:
    assert prepare(source, "bpe", 300, tmp_path).fingerprint == prepared.fingerprint
    assert prepare(source, "bpe", 301, tmp_path).fingerprint != prepared.fingerprint


def test_the_cache_folder_follows_the_environment(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder() -> Path:
        return prepare(source, "bpe", 257).tokenizer_path.parents[1]

    assert folder() == tmp_path / "default-cache" / "tokens"
    monkeypatch.delenv("LEAVEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder() == tmp_path / "xdg" / "leaven" / "tokens"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder() == tmp_path / "home" / ".cache" / "leaven" / "tokens"


def test_progress_goes_from_nothing_to_all_in_every_stage(source: str, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare(source, "bpe", 300, tmp_path, lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["reading", "tokenizer", "encoding"]
    for stage in ("reading", "tokenizer", "encoding"):
        done = [call[1] for call in calls if call[0] == stage]
        assert done == sorted(done)
        assert done[-1] == open_corpus(source).n_bytes


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("false", "false"), ("true", "true")])
def test_forks_after_preparing_find_one_thread(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    if before:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    prepare(source, "bpe", 300, tmp_path)
    assert os.environ["TOKENIZERS_PARALLELISM"] == after


def test_shards_and_pieces_do_not_change_the_tokens(
    source: str, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SHARD_TOKENS", 1_000)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 500)
    sharded = prepare(source, "bpe", 300, tmp_path)
    folder = sharded.tokenizer_path.parent
    lengths = json.loads((folder / "index.json").read_text())["splits"]["train"]["shards"]
    assert len(lengths) > 10
    assert set(lengths[:-1]) == {1_000}
    assert (folder / "train-00000.bin").stat().st_size == 2_000
    assert sharded.fingerprint == prepared.fingerprint
    assert np.array_equal(sharded.train[:], prepared.train[:])


def test_a_long_document_is_encoded_in_pieces_that_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(tokens, "TRAINING_BYTES", 3_000)
    text = "".join(f"line {number} of the text\n" for number in range(2_000)) + "x" * 1_000
    (tmp_path / "long.txt").write_text(text)
    found = prepare(str(tmp_path / "long.txt"), "bpe", 300, tmp_path)
    tokenizer = Tokenizer.from_file(str(found.tokenizer_path))
    assert tokenizer.decode([*found.train[:], *found.validation[:]]) == text
    assert (found.train[:] == found.end_of_text).sum() == 1


@given(st.lists(st.integers(0, 6), max_size=6), st.data())
def test_sharded_tokens_slice_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    sharded = ShardedTokens(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [])
    bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    index = slice(data.draw(bound), data.draw(bound))
    assert len(sharded) == len(whole)
    assert np.array_equal(sharded[index], whole[index])


def test_a_given_tokenizer_is_used_whole(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path / "tokenizer.json", 70_000, end="</s>")
    (tmp_path / "a.txt").write_text("word5 word69999 word7 word8 word9 unheard\n" * 100)
    found = prepare(f"{tmp_path}/*.txt", str(path), 70_016, tmp_path)
    assert found.vocab_size == 70_000
    assert found.end_of_text == 1
    assert found.train[:].dtype == np.uint32
    # Neither cut to three nor filled to five tokens, as its file asks.
    assert found.train[:7].tolist() == [5, 69_999, 7, 8, 9, 0, 5]
    assert found.validation[-1:].tolist() == [1]


def test_another_tokenizer_file_is_another_cache(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word5 word9\n" * 100)
    path = tmp_path / "tokenizer.json"
    first = prepare(f"{tmp_path}/*.txt", str(word_tokenizer(path, 20)), 64, tmp_path)
    second = prepare(f"{tmp_path}/*.txt", str(word_tokenizer(path, 8)), 64, tmp_path)
    assert first.fingerprint != second.fingerprint
    assert first.tokenizer_path != second.tokenizer_path


def bad_arguments(folder: Path) -> Iterator[tuple[str, int, str]]:
    """(tokenizer, vocab_size, a part of the message)."""
    (folder / "broken.json").write_text('{"model": ')
    (folder / "binary.json").write_bytes(b"\xff\xfe")
    yield "bpe", 256, "vocab_size 256 is too small for bpe: 256 bytes and <|endoftext|> need 257"
    yield "hf://org/model", 300, "download its tokenizer.json and give the path"
    yield "unigram", 300, "'unigram' cannot be read (No such file or directory); give bpe or the path"
    yield str(folder), 300, "(Is a directory); give bpe or the path"
    yield str(folder / "broken.json"), 300, "is no tokenizer.json"
    yield str(folder / "binary.json"), 300, "cannot be read"
    yield (
        str(word_tokenizer(folder / "big.json", 1_500)),
        1_024,
        "1,500 tokens, more than vocab_size 1,024; set",
    )
    yield (
        str(word_tokenizer(folder / "endless.json", 9, "[END]")),
        300,
        "has no end-of-text token; add one of",
    )


def test_every_bad_tokenizer_is_refused_in_one_line_and_writes_nothing(source: str, tmp_path: Path) -> None:
    for tokenizer, vocab_size, message in bad_arguments(tmp_path):
        with pytest.raises(InputError) as caught:
            prepare(source, tokenizer, vocab_size, tmp_path / "cache")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_cannot_be_used_is_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be used .*set LEAVEN_CACHE to a folder"):
        prepare(source, "bpe", 300, tmp_path / "file")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize("harm", [Path.unlink, _truncate])
@pytest.mark.parametrize("name", ["index.json", "tokenizer.json", "train-00000.bin", "validation-00000.bin"])
def test_a_broken_cache_is_rebuilt(source: str, prepared: TokenSet, tmp_path: Path, harm, name: str) -> None:
    folder = prepare(source, "bpe", 300, tmp_path).tokenizer_path.parent
    harm(folder / name)
    again = prepare(source, "bpe", 300, tmp_path)
    assert np.array_equal(again.train[:], prepared.train[:])
    assert np.array_equal(again.validation[:], prepared.validation[:])
    assert (folder / name).exists()


def test_a_failure_leaves_nothing_behind(
    source: str, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_sync", full)
        with pytest.raises(InputError, match="No space left on device"):
            prepare(source, "bpe", 300, tmp_path)
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".lock"]
    assert prepare(source, "bpe", 300, tmp_path).fingerprint == prepared.fingerprint


PREPARE = """
import os, signal, sys
from pathlib import Path
from leaven.data import tokens
source, cache, stop = sys.argv[1:]
tokens.SHARD_TOKENS = 1_000
write, sync, rename = tokens._write, tokens._sync, Path.rename
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def write_half(path, raw): path.write_bytes(raw[: len(raw) // 2]); die()
def rename_and_die(*paths): rename(*paths); die()
def progress(stage, done, total):
    if stage == stop: die()
def write_half_an_index(path, raw): (write_half if path.name == "index.json" else write)(path, raw)
if stop == "index": tokens._write = write_half_an_index
if stop == "before rename": Path.rename = die
if stop == "after rename": Path.rename = rename_and_die
print("started", flush=True)
stages = set()
found = tokens.prepare(source, "bpe", 300, Path(cache), lambda *call: (stages.add(call[0]), progress(*call)))
print("encoding" in stages, found.fingerprint)
"""


def start(source: str, cache: Path, stop: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, source, str(cache), stop]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def assert_nothing_or_whole(cache: Path, expected: TokenSet) -> None:
    for folder in (cache / "tokens").glob("[!.]*"):
        found = tokens._open(folder)
        assert found is not None
        assert found.fingerprint == expected.fingerprint


STOPS = ["reading", "tokenizer", "encoding", "index", "before rename", "after rename"]


@pytest.mark.parametrize("stop", STOPS)
def test_a_kill_at_a_chosen_moment_leaves_nothing_or_a_whole_cache(
    source: str, prepared: TokenSet, tmp_path: Path, stop: str
) -> None:
    process = start(source, tmp_path, stop)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert_nothing_or_whole(tmp_path, prepared)
    assert bool(list((tmp_path / "tokens").glob("[!.]*"))) == (stop == "after rename")
    assert prepare(source, "bpe", 300, tmp_path).fingerprint == prepared.fingerprint
    assert not list((tmp_path / "tokens").glob("*.draft"))


def test_kills_at_random_moments_leave_nothing_or_a_whole_cache(
    source: str, prepared: TokenSet, tmp_path: Path
) -> None:
    chance = random.Random(1)
    for _ in range(6):
        process = start(source, tmp_path)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.communicate()
        assert_nothing_or_whole(tmp_path, prepared)
    assert prepare(source, "bpe", 300, tmp_path).fingerprint == prepared.fingerprint


def test_of_processes_that_prepare_the_same_at_once_one_works_and_all_end_right(
    source: str, prepared: TokenSet, tmp_path: Path
) -> None:
    processes = [start(source, tmp_path) for _ in range(4)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert {output.split()[-1] for output in outputs} == {prepared.fingerprint}
    assert sorted(output.split()[-2] for output in outputs) == ["False", "False", "False", "True"]
    assert len(list((tmp_path / "tokens").glob("[!.]*"))) == 1


def test_the_standard_library_is_enough_for_a_vocabulary_of_4096(tmp_path: Path) -> None:
    found = prepare("python-stdlib", "bpe", 4_096, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.bin")}
    assert prepare("python-stdlib", "bpe", 4_096, tmp_path).fingerprint == found.fingerprint
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.bin")} == written != {}
    assert found.vocab_size == 4_096
    assert len(found.train) > 1_000_000
    assert len(found.validation) > 10_000
    # Four thousand tokens of source code should take at least three bytes each.
    assert found.train_bytes / len(found.train) > 3
