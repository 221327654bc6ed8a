"""Shards on disk are complete or absent after a kill, and rebuilt when damaged."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_tokens import write_corpus
from tests.errors import refused

from leaven.data import file_tokens, shards
from leaven.data.corpus import Corpus
from leaven.data.pool import encode_in_order
from leaven.data.shards import ShardedTokens
from leaven.data.tokenizer import TextPiece
from leaven.data.tokens import TokenSet, prepare
from leaven.documents import digest_of
from leaven.errors import InputError
from leaven.recipe.data import Data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data(source=write_corpus(tmp_path_factory.mktemp("corpus")), tokens=1)


@pytest.fixture(scope="module")
def prepared(data: Data, tmp_path_factory: pytest.TempPathFactory) -> TokenSet:
    """The corpus in one shard of one batch."""
    return prepare(data, 300, tmp_path_factory.mktemp("cache"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """About fifteen shards, of two batches each."""
    monkeypatch.setattr("leaven.data.shards.BATCH_CHARACTERS", 3_000)
    monkeypatch.setattr("leaven.data.shards.SHARD_BATCHES", 2)


def folder_in(cache: Path) -> Path:
    (folder,) = (cache / "tokens").iterdir()
    return folder


def same(a: TokenSet, b: TokenSet) -> bool:
    return (
        a.fingerprint == b.fingerprint
        and np.array_equal(a.train[:], b.train[:])
        and np.array_equal(a.validation[:], b.validation[:])
        and (a.train_bytes, a.validation_bytes) == (b.train_bytes, b.validation_bytes)
    )


@given(st.lists(st.integers(0, 6), max_size=6), st.data())
def test_sharded_tokens_slice_like_one_array(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    sharded = ShardedTokens(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [])
    bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    index = slice(data.draw(bound), data.draw(bound))
    assert len(sharded) == len(whole)
    assert np.array_equal(sharded[index], whole[index])


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_do_not_depend_on_shards_or_processes(
    data: Data, prepared: TokenSet, tmp_path: Path, processes: int
) -> None:
    assert same(prepare(data, 300, tmp_path, processes=processes), prepared)
    index = json.loads((folder_in(tmp_path) / "index.json").read_text())
    assert len(index["shards"]) > 10
    # A shard may have no validation text; an empty file cannot be mapped.
    assert {shard["validation"]["tokens"] == 0 for shard in index["shards"]} == {True, False}


def test_each_batch_is_written_at_once(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is not held in memory."""
    monkeypatch.setattr("leaven.data.shards.BATCH_CHARACTERS", 3_000)
    held: list[weakref.ref[Any]] = []
    most = 0

    def watched(*arguments: Any) -> Iterator[Any]:
        nonlocal most
        for result in encode_in_order(*arguments):
            held.append(weakref.ref(result[1][0].ids))
            most = max(most, sum(ids() is not None for ids in held))
            yield result

    monkeypatch.setattr("leaven.data.shards.encode_in_order", watched)
    prepare(data, 300, tmp_path)
    assert len(held) > 20
    assert most <= 3


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def flipped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "was missing; it was rebuilt"),
        (truncated, "bytes; it was rebuilt"),
    ],
)
def test_only_a_damaged_shard_is_rebuilt(
    data: Data, prepared: TokenSet, tmp_path: Path, harm: Callable[[Path], None], message: str
) -> None:
    prepare(data, 300, tmp_path)
    folder = folder_in(tmp_path)
    before = {path: path.stat().st_ino for path in folder.glob("*.bin")}
    damaged = folder / "train-00003.bin"
    harm(damaged)
    again = prepare(data, 300, tmp_path)
    assert same(again, prepared)
    (note,) = again.notes
    assert note.startswith(f"{damaged} ")
    assert note.endswith(message)
    after = {path: path.stat().st_ino for path in folder.glob("*.bin")}
    pair = {damaged, folder / "validation-00003.bin"}
    assert {path for path in after if path not in pair and after[path] != before[path]} == set()
    assert prepare(data, 300, tmp_path).notes == ()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_shard_that_rots_under_its_time_stamp_is_not_trained_on(
    data: Data, prepared: TokenSet, tmp_path: Path, split: str
) -> None:
    prepare(data, 300, tmp_path)
    damaged = max(folder_in(tmp_path).glob(f"{split}-*.bin"), key=lambda path: path.stat().st_size)
    stamp = damaged.stat()
    flipped(damaged)
    os.utime(damaged, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    found = prepare(data, 300, tmp_path)
    assert found.notes == ()
    with pytest.raises(InputError, match=f"{damaged} is damaged: its bytes 0 to .*; remove it and run the same"):
        getattr(found, split)[:]
    damaged.unlink()
    assert same(prepare(data, 300, tmp_path), prepared)


@pytest.mark.usefixtures("small")
def test_a_shard_that_is_truncated_while_it_is_read_gives_one_line(data: Data, tmp_path: Path) -> None:
    found = prepare(data, 300, tmp_path)
    found.train[:]
    file = folder_in(tmp_path) / "train-00003.bin"
    size = file.stat().st_size
    truncated(file)
    with pytest.raises(InputError, match=f"{file} has been truncated to {size - 2:,} of {size:,} bytes; remove it"):
        found.train[:]


BLOCKS_HARM: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no blocks": lambda entry: entry.pop("blocks"),
    "short": lambda entry: entry["blocks"].update(train="00"),
    "no hexadecimal": lambda entry: entry["blocks"].update(train="g" * len(entry["blocks"]["train"])),
}


def change_entries(folder: Path, change: Callable[[dict[str, Any]], None], *names: str) -> None:
    """Change the entry of each shard in index.json and in shards.jsonl, under their old time stamps."""
    for path in (folder / name for name in names):
        stamp = path.stat().st_mtime_ns
        if path.name == "index.json":
            document = json.loads(path.read_text())
            for entry in document["shards"]:
                change(entry)
            del document["digest"]
            document["digest"] = digest_of(document)
            path.write_text(json.dumps(document))
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                change(line)
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        os.utime(path, ns=(stamp, stamp))


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("names", [["index.json"], ["index.json", "shards.jsonl"]])
@pytest.mark.parametrize("change", BLOCKS_HARM)
def test_a_shard_that_rots_beside_damaged_checksums_is_not_used(
    data: Data, prepared: TokenSet, tmp_path: Path, change: str, names: list[str]
) -> None:
    prepare(data, 300, tmp_path)
    folder = folder_in(tmp_path)
    damaged = folder / "train-00003.bin"
    stamp = damaged.stat()
    flipped(damaged)
    os.utime(damaged, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    change_entries(folder, BLOCKS_HARM[change], *names)
    if names == ["index.json"]:  # the shard is read again, and compared with its checksums in the log
        with pytest.raises(InputError, match=f"{damaged} is damaged: .*; remove it and run the same command again"):
            prepare(data, 300, tmp_path)
        damaged.unlink()
    assert same(prepare(data, 300, tmp_path), prepared)


@given(st.integers(0, 200), st.integers(0, 9), st.data())
def test_every_block_is_compared_once_when_it_is_first_read(count: int, offset: int, data: st.DataObject) -> None:
    whole = np.arange(count, dtype=np.uint16)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(file_tokens, "BLOCK", 32)  # 16 tokens
        file, checksums = Path(folder, "ids"), file_tokens.BlockChecksums()
        for piece in np.array_split(whole, data.draw(st.integers(1, 5))):
            checksums.update(piece.data)
        file.write_bytes(bytes(offset) + whole.tobytes())
        tokens = file_tokens.FileTokens(file, whole.dtype, count, offset=offset)
        tokens.set_checksums(checksums.hexdigest())
        bound = st.none() | st.integers(-count - 2, count + 2)
        for _ in range(3):
            index = slice(data.draw(bound), data.draw(bound))
            assert np.array_equal(tokens[index], whole[index])
        if count:
            tokens.set_checksums(checksums.hexdigest())
            place = data.draw(st.integers(0, count - 1))
            with file.open("r+b") as content:
                content.seek(offset + 2 * place)
                content.write(b"\xff")  # no id here has this byte
            block = place // 16
            assert np.array_equal(tokens[: block * 16], whole[: block * 16])
            assert np.array_equal(tokens[(block + 1) * 16 :], whole[(block + 1) * 16 :])
            for index in (slice(place, place + 1), slice(None)):
                with pytest.raises(InputError, match="is damaged"):
                    tokens[index]


HARM: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no first shard": lambda index: index["shards"].pop(0),
    "fewer documents": lambda index: index["shards"][0]["train"].update(documents=1),
    "no record": lambda index: index.update(shards=[5, *index["shards"][1:]]),
    "other fingerprint": lambda index: index.update(fingerprint="0" * 32),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_index_that_does_not_fit_the_text_is_rebuilt(
    data: Data, prepared: TokenSet, tmp_path: Path, harm: str
) -> None:
    prepare(data, 300, tmp_path)
    path = folder_in(tmp_path) / "index.json"
    index = json.loads(path.read_text())
    damaged = json.loads(path.read_text())
    HARM[harm](damaged)
    if harm != "other fingerprint":  # which only the digest shows
        digest = digest_of({key: value for key, value in damaged.items() if key != "digest"})
        damaged["digest"] = digest
    path.write_text(json.dumps(damaged))
    assert same(prepare(data, 300, tmp_path), prepared)
    assert json.loads(path.read_text()) == index


def test_a_log_of_shards_that_does_not_fit_the_text_is_rebuilt(
    data: Data, prepared: TokenSet, tmp_path: Path
) -> None:
    prepare(data, 300, tmp_path)
    folder = folder_in(tmp_path)

    def more_bytes(entry: dict[str, Any]) -> None:
        entry["train"]["bytes"] += 1

    change_entries(folder, more_bytes, "shards.jsonl")
    (folder / "index.json").unlink()
    found = prepare(data, 300, tmp_path)
    assert same(found, prepared)
    assert found.notes == (f"{folder / 'shards.jsonl'} did not fit the text; it was rebuilt",)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("end", [InputError("a file changed"), KeyboardInterrupt()])
def test_shards_of_a_text_that_was_wrong_for_a_while_are_rebuilt(
    data: Data, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """A file was edited, or read wrongly, while it was tokenised, and its size stayed the same. A run that is stopped
    does not reach the end of the file, where a change is noticed."""
    right = shards._batches

    def wrong(corpus: Corpus) -> Iterator[list[TextPiece]]:
        for batch in islice(right(corpus), 8):
            yield [piece._replace(text=piece.text.swapcase()) for piece in batch]
        raise end

    monkeypatch.setattr(shards, "_batches", wrong)
    with pytest.raises(type(end)):
        prepare(data, 300, tmp_path, processes=1)
    monkeypatch.setattr(shards, "_batches", right)
    log = folder_in(tmp_path) / "shards.jsonl"
    assert len(log.read_text().splitlines()) > 2
    found = prepare(data, 300, tmp_path, processes=1)
    assert same(found, prepared)
    assert found.notes == (f"{log} did not fit the text; it was rebuilt",)


@pytest.mark.usefixtures("small")
def test_finished_shards_are_kept_if_the_text_cannot_be_read_for_a_while(
    data: Data, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files on a network disk may be away for a moment."""
    right = shards._batches

    def interrupted(corpus: Corpus) -> Iterator[list[TextPiece]]:
        yield from islice(right(corpus), 8)
        raise InputError("a file is missing")

    monkeypatch.setattr(shards, "_batches", interrupted)
    with refused("is missing"):
        prepare(data, 300, tmp_path, processes=1)
    monkeypatch.setattr(shards, "_batches", right)
    log = folder_in(tmp_path) / "shards.jsonl"
    finished = log.read_text()
    assert len(finished.splitlines()) > 2
    assert same(prepare(data, 300, tmp_path, processes=1), prepared)
    assert log.read_text().startswith(finished)


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def odd_shard(path: Path) -> None:
    """Add an entry whose number is no number to shards.jsonl."""
    path.write_text(path.read_text() + json.dumps(json.loads(path.read_text()) | {"shard": "x"}) + "\n")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *[(name, harm) for name in ("index.json", "shards.jsonl") for harm in (Path.unlink, truncated, nested)],
        ("shards.jsonl", odd_shard),
    ],
)
def test_damaged_index_files_are_rebuilt(
    data: Data, prepared: TokenSet, tmp_path: Path, harm: Callable[[Path], None], name: str
) -> None:
    prepare(data, 300, tmp_path)
    folder = folder_in(tmp_path)
    harm(folder / name)
    if name != "index.json":
        (folder / "index.json").unlink()
    assert same(prepare(data, 300, tmp_path), prepared)
    assert (folder / name).exists()


@pytest.mark.parametrize("left", ["tokens", "shards.jsonl", "tokenizers"])
def test_a_copy_under_another_name_is_not_believed(data: Data, tmp_path: Path, left: str) -> None:
    """Two caches of one text with tokenizers of two sizes; a part of one takes the place of that of the other."""
    expected = prepare(data, 300, tmp_path / "one")
    prepare(data, 280, tmp_path / "other")
    if left == "tokenizers":
        (mine,), (theirs,) = ((tmp_path / name / left).glob("bpe-*") for name in ("one", "other"))
        shutil.copytree(tmp_path / "other" / left / theirs.read_text().split()[-1], mine.parent / "x")
        (mine.parent / "x").rename(mine.parent / theirs.read_text().split()[-1])
        shutil.copy(theirs, mine)
    else:
        mine, theirs = folder_in(tmp_path / "one"), folder_in(tmp_path / "other")
        shutil.rmtree(mine)
        shutil.copytree(theirs, mine)
        if left == "shards.jsonl":
            (mine / "index.json").unlink()
    assert same(prepare(data, 300, tmp_path / "one"), expected)


def test_a_cache_of_an_earlier_version_is_used(data: Data, prepared: TokenSet, tmp_path: Path) -> None:
    """It has a checksum of each whole file, too."""
    prepare(data, 300, tmp_path)
    folder = folder_in(tmp_path)
    change_entries(folder, lambda entry: entry["train"].update(blake2b="0" * 32, unknown=0), "index.json")
    before = (folder / "index.json").read_bytes()
    assert same(prepare(data, 300, tmp_path), prepared)
    assert (folder / "index.json").read_bytes() == before


@pytest.mark.usefixtures("small")
def test_a_full_disk_keeps_finished_shards(
    data: Data, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 30:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(InputError) as caught:
            prepare(data, 300, tmp_path)
    assert str(caught.value).startswith(f"the cache folder {tmp_path} cannot be used (No space left on device); set")
    folder = folder_in(tmp_path)
    assert not list(folder.glob(".*.tmp"))
    kept = {path: path.stat().st_ino for path in folder.glob("train-*.bin")}
    assert len(kept) >= 3
    assert same(prepare(data, 300, tmp_path), prepared)
    journal = [json.loads(line)["shard"] for line in (folder / "shards.jsonl").read_text().split("\n") if line]
    assert journal == sorted(set(journal))
    assert sum(path.stat().st_ino == inode for path, inode in kept.items()) >= len(kept) - 1


PREPARE = """
import os, signal, sys
from pathlib import Path
from leaven import storage
from leaven.data import shards, tokens
from leaven.recipe.data import Data

if __name__ == "__main__":
    source, cache, stop, processes = sys.argv[1:]
    shards.BATCH_CHARACTERS, shards.SHARD_BATCHES = 3_000, 2
    write, replace, append = storage.write, Path.replace, storage.append_json
    def die(*_): os.kill(os.getpid(), signal.SIGKILL)
    def write_half(path, raw):
        if path.name == "index.json":
            with storage.replacing(path) as file: file.write(raw[: len(raw) // 2]); file.flush(); die()
        write(path, raw)
    def die_at_shard_7(path, line):
        if line["shard"] == 7: die()
        append(path, line)
    def replace_and_die(source, final):
        if final.name == "train-00007.bin" and stop == "before a rename": die()
        replace(source, final)
        if final.name == "train-00007.bin" and stop == "after a rename": die()
        if final.name == "index.json" and stop == "after the index": die()
    if stop == "half an index": storage.write = write_half
    if stop == "before the journal": storage.append_json = die_at_shard_7
    Path.replace = replace_and_die
    stages = set()
    def progress(stage, done, total):
        stages.add(stage)
        if stage == stop: die()
    print("started", flush=True)
    found = tokens.prepare(Data(source=source, tokens=1), 300, Path(cache), progress, int(processes))
    print("encoding" in stages, found.fingerprint)
"""


def start(
    data: Data, cache: Path, stop: str = "", processes: int = 1, pipe: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    script = cache / "prepare.py"
    if not script.exists():
        script.write_text(PREPARE)
    command = [sys.executable, str(script), str(data.source), str(cache), stop, str(processes)]
    # In its own process group, so that remaining children can be counted.
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0)


def finished(cache: Path) -> dict[Path, int]:
    """The files of the shards that the journal says are finished."""
    names = []
    for journal in (cache / "tokens").glob("*/shards.jsonl"):
        for line in journal.read_text().split("\n"):
            if line.endswith("}"):
                names += [journal.with_name(f"{split}-{json.loads(line)['shard']:05}.bin") for split in ("train",)]
    return {path: path.stat().st_ino for path in names}


STOPS = ["reading", "tokenizer", "before a rename", "after a rename", "before the journal", "half an index"]


COMMON = {"before a rename"}  # a moment in every `make test`; all in `make kills`


@pytest.mark.long
@pytest.mark.parametrize(
    "stop",
    [pytest.param(stop, marks=[pytest.mark.kills] * (stop not in COMMON)) for stop in (*STOPS, "after the index")],
)
def test_a_kill_loses_at_most_one_shard(data: Data, prepared: TokenSet, tmp_path: Path, stop: str) -> None:
    process = start(data, tmp_path, stop)
    _, error = process.communicate()
    assert process.returncode == -signal.SIGKILL, error
    before = finished(tmp_path)
    expected = {"reading": 0, "tokenizer": 0, "half an index": 12, "after the index": 12}.get(stop, 7)
    assert len(before) >= expected if expected == 12 else len(before) == expected
    process = start(data, tmp_path)
    output, error = process.communicate()
    assert output.split()[-1] == prepared.fingerprint, error
    assert output.split()[-2] == str(stop != "after the index")
    after = finished(tmp_path)
    assert {path: after[path] for path in before} == before
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.kills
def test_random_kills_lose_no_finished_shard(data: Data, prepared: TokenSet, tmp_path: Path) -> None:
    chance = random.Random(1)
    kept: dict[Path, int] = {}
    for _ in range(4):
        process = start(data, tmp_path, processes=2)
        process.stdout.readline()
        time.sleep(chance.uniform(0, 1))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        now = finished(tmp_path)
        assert {path: now[path] for path in kept} == kept
        kept = now
    process = start(data, tmp_path, processes=2)
    output, error = process.communicate()
    assert output.split()[-1] == prepared.fingerprint, error


def test_child_processes_exit_with_a_killed_parent(data: Data, tmp_path: Path) -> None:
    # Without pipes: remaining children would keep them open.
    process = start(data, tmp_path, "encoding", processes=2, pipe=subprocess.DEVNULL)
    assert process.wait() == -signal.SIGKILL

    def left() -> list[int]:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    until = time.monotonic() + 20
    while left() and time.monotonic() < until:
        time.sleep(0.02)
    remaining = left()
    for number in remaining:
        os.kill(number, signal.SIGKILL)
    assert remaining == []


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_a_dead_child_process_keeps_finished_shards(
    data: Data, prepared: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaven.data.corpus.REPORT_EVERY_BYTES", 1)

    def kill(stage: str, done: int, total: int) -> None:
        if finished(tmp_path):
            for process in active_children():
                process.kill()

    with pytest.raises(InputError, match=r"a tokenising process died.*are kept"):
        prepare(data, 300, tmp_path, kill, processes=2)
    before = finished(tmp_path)
    assert before
    assert same(prepare(data, 300, tmp_path, processes=2), prepared)
    assert {path: finished(tmp_path)[path] for path in before} == before


class Sleeper:
    """An encoder that takes as many seconds as its batch says."""

    def encode(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


@pytest.mark.long
def test_closing_ends_child_processes_at_once() -> None:
    work: Any = iter([(0, 0.0), (1, 40.0), (2, 40.0), (3, 40.0)])
    encoder: Any = Sleeper()
    began = time.monotonic()
    with closing(encode_in_order(encoder, work, 0, processes=2)) as results:
        assert next(results) == (0, 0.0)
        time.sleep(0.3)  # both processes have begun a batch
    assert time.monotonic() - began < 30


SIGNALLED = """
import json, os, signal
from leaven.data.pool import encode_in_order

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
results = encode_in_order(json.JSONEncoder(), iter(enumerate("abcdefgh")), 0, processes=2)
found = [next(results)]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.killpg(0, number)
print(*(text for _, text in [*found, *results]))
"""


@pytest.mark.long
def test_signals_to_the_whole_job_reach_no_child_process() -> None:
    """Not even the one that tracks semaphores, whose end gives tracebacks."""
    command = [sys.executable, "-c", SIGNALLED]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    assert (done.stdout, done.stderr) == ('"a" "b" "c" "d" "e" "f" "g" "h"\n', "")


@pytest.mark.long
def test_one_of_several_processes_prepares_the_data(data: Data, prepared: TokenSet, tmp_path: Path) -> None:
    processes = [start(data, tmp_path) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert {output.split()[-1] for output in outputs} == {prepared.fingerprint}
    assert sorted(output.split()[-2] for output in outputs) == ["False", "True"]
    assert len(list((tmp_path / "tokens").iterdir())) == 1
