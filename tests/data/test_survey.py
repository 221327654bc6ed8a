import json
import os
import time
from pathlib import Path

import pytest

from leaven.data import survey
from leaven.data.corpus import Corpus, open_corpora
from leaven.recipe.data import DataSource


def write(path: Path, text: str, age_seconds: float = 60) -> None:
    path.write_text(text)
    os.utime(path, (time.time() - age_seconds,) * 2)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the files that are read. The change time of a file cannot be set, so changes settle at once."""
    seen: list[str] = []
    plain = survey.survey
    monkeypatch.setattr(survey, "survey", lambda part, on_bytes: (seen.append(part.key), plain(part, on_bytes))[1])
    monkeypatch.setattr(survey, "_SETTLED_NS", 0)
    return seen


def opened(folder: Path, share: float = 0.0) -> Corpus:
    return open_corpora([DataSource(source=f"{folder}/*.txt")], share, folder / "memory")[0]


def test_only_changed_files_are_read_again(tmp_path: Path, read: list[str]) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.txt", name * 10)
    first = opened(tmp_path)
    assert read == ["a.txt", "b.txt", "c.txt"]
    assert opened(tmp_path) == first
    assert len(read) == 3
    before = (tmp_path / "b.txt").stat()
    write(tmp_path / "b.txt", "B" * 10)
    os.utime(tmp_path / "b.txt", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    (tmp_path / "c.txt").unlink()
    write(tmp_path / "d.txt", "d")
    second = opened(tmp_path)
    assert read[3:] == ["b.txt", "d.txt"]
    assert second.fingerprint != first.fingerprint
    assert second == open_corpora([DataSource(source=f"{tmp_path}/*.txt")], 0.0)[0]


def test_a_file_written_just_now_is_read_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "_SETTLED_NS", 2 * 10**9)
    write(tmp_path / "a.txt", "text", age_seconds=0)
    opened(tmp_path)
    opened(tmp_path)
    assert read == ["a.txt", "a.txt"]


@pytest.mark.parametrize("harm", ["{", '{"format": 1, "parts": {"a.txt": 5}}', '{"format": 0, "parts": {}}'])
def test_a_damaged_survey_cache_is_rebuilt(tmp_path: Path, read: list[str], harm: str) -> None:
    write(tmp_path / "a.txt", "text")
    first = opened(tmp_path)
    (file,) = (tmp_path / "memory").iterdir()
    whole = json.loads(file.read_text())
    file.write_text(harm)
    assert opened(tmp_path) == first
    assert read == ["a.txt", "a.txt"]
    assert json.loads(file.read_text()) == whole


def test_faults_are_cached_but_a_broken_file_is_read_again(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path / "a.jsonl", '{"text": "one"}\n{')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    sources = [DataSource(source=f"{tmp_path}/*.*")]
    (first,) = open_corpora(sources, 0.5, tmp_path / "memory")
    assert "a.jsonl:2 is not JSON" in first.skipped
    assert "b.txt is not UTF-8" in first.skipped
    assert open_corpora(sources, 0.5, tmp_path / "memory") == [first]
    assert read == ["a.jsonl", "b.txt", "b.txt"]


def test_a_survey_is_saved_while_it_runs(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.txt", name)
    monkeypatch.setattr(survey, "SAVE_EVERY_SECONDS", -1.0)
    plain = survey.survey

    def killed(part, on_bytes):
        if part.key == "c.txt":
            raise KeyboardInterrupt
        return plain(part, on_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(survey, "survey", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path)
    opened(tmp_path)
    assert read == ["a.txt", "b.txt", "c.txt"]
