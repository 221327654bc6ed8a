"""What is shown of errors: one line, no escape sequences, no passwords; a bug leaves a file to report."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rich.text import Text
from tests.cli.conftest import Verb

from leaven.cli import BUG, DEBUG, error_message
from leaven.errors import InputError, shown
from leaven.storage import write_page, write_text
from leaven.views.terminal.console import SafeConsole, errors

PASSWORD = "hunter2"
URLS = [
    f"postgresql://user:{PASSWORD}@host/db",
    f"postgresql:/user:{PASSWORD}@host/db",  # as a path
    f"postgresql+psycopg://user:{PASSWORD}@a@b@host:5432/db",
    f"postgresql://user:a@{PASSWORD}@host/db",
    f"postgresql://user:{PASSWORD}/with?signs#@host/db",
    f"postgresql://user:{PASSWORD} with spaces@host/db",
    f"postgresql://:{PASSWORD}@host/db",
    f"postgresql://host/db?user=me&password={PASSWORD}&x=1",
    f"postgresql://host/db?sslpassword={PASSWORD}",
    f"https://user:{PASSWORD}@host/x.txt",
    f"postgresql://user:80 {PASSWORD}@host/db",
    f"postgresql://user:80/{PASSWORD} x@host/db",
    f"postgresql://host/db?password=a'{PASSWORD}&x=1",
    f"host=h password={PASSWORD} user=me",
    f"host=h PASSWORD = {PASSWORD}&'{PASSWORD}",
    f"password='a {PASSWORD} \\' {PASSWORD}' host=h",
    f"hf://org/name?token={PASSWORD}",
    f"hf:/org/name?revision=a&access_token={PASSWORD}",
    f"https://host/x?X-Amz-Credential={PASSWORD}&X-Amz-Signature={PASSWORD}",
    f"https://host/x?sv=1&sig={PASSWORD}&Signature={PASSWORD}&api-key={PASSWORD}&client_secret={PASSWORD}",
    f"https://host/x?pwd={PASSWORD}&passwd={PASSWORD}&auth={PASSWORD}&credential={PASSWORD}",
    f"https://host/x?AWSAccessKeyId={PASSWORD}#access_token={PASSWORD}",
    f"https://host/x#access_token={PASSWORD}&x=1",
]
PLAIN = ["http://127.0.0.1:8000/?x=1 is open", "sqlite:////a/b:c.db", "C:/a:b/c", "a: b@c", "s3://bucket/a:b"]
PLAIN += [
    "open http://127.0.0.1:8000/?token=a_b-c",
    "https://host/x?tokens=3&keys=a&design=b&author=c",
    "token = 3, key=a",
]
PLAIN += ["see http://localhost:6006, or write to a@b.c", "tcp://10.0.0.1:29500 && scp out me@host:/data"]
PLAIN += ["http://localhost:8080: ask a@b", "(http://host:8080) a@b", "http://[::1]:8080/x a@b", "https://x.org: a@b"]
PLAIN += ["curl http://h:80/x?a=b -d @file", "from mysql is not a store: postgresql://USER@HOST"]
PLAIN += ["me@host:5432", "a passwordless login = me", "lines\nand\ttabs, ä 漢字 🙂"]


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_never_shown(url: str) -> None:
    assert PASSWORD not in shown(f"error: cannot open '{url}': no such host")
    assert "***" in shown(url)
    assert PASSWORD not in str(InputError(f"{url}: no such host"))  # as Python prints it


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in PLAIN),
        ("'postgresql://h/d?password=p&x=1': no host", "'postgresql://h/d?password=***&x=1': no host"),
        ("'host=h password=p': no host", "'host=h password=***': no host"),
        ("password = 'a b' user=me", "password=*** user=me"),
        ("\x1b[31m\x9b\x7f\r\x00\u202e\u2066\udce9", r"\u001b[31m\u009b\u007f\u000d\u0000\u202e\u2066\udce9"),
    ],
)
def test_only_passwords_and_control_characters_are_changed(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_a_console_prints_styles_but_no_foreign_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    console = SafeConsole(force_terminal=True, color_system="standard", soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), "\x1b]0;owned and postgresql://u:p@h"))
    assert capsys.readouterr().out == "\x1b[1;31merror: \x1b[0m\\u001b]0;owned and postgresql://u:***@h\n"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leaven: Verb) -> Verb:
    """The command line, in which every command has a bug. Files of reports are written to ``tmp_path``."""

    def bug(**_: object) -> None:
        raise ZeroDivisionError("\x1b[31m in\na line, of postgresql://user:hunter2@host")

    monkeypatch.setattr("leaven.cli.app", bug)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(DEBUG, raising=False)
    return leaven


def test_a_rank_without_torchrun_prints_errors(leaven: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert leaven("show", "nosuch.toml")[2] == "error: nosuch.toml: no such file\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_a_terminal_that_is_gone_ends_no_command() -> None:
    """As after `leaven train ... &` and `exit`."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        console = SafeConsole(file=stream, stderr=True)
        os.close(master)
        console.print("step 1")
        console.print("step 2")
        stream.write("nothing reads this")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_an_error_of_a_disk_is_not_taken_for_a_terminal_that_is_gone(tmp_path: Path) -> None:
    class Broken:
        def __init__(self, descriptor: int) -> None:
            self._descriptor = descriptor

        def fileno(self) -> int:
            return self._descriptor

        def flush(self) -> None: ...

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    master, slave = os.openpty()
    with (tmp_path / "out.json").open("w") as file:
        with pytest.raises(OSError, match="Input/output error") as raised:
            SafeConsole(file=Broken(file.fileno())).print("{}")
        assert "check that the disk is mounted" in str(error_message(raised.value))
        SafeConsole(file=Broken(file.fileno()), stderr=True).print("step 1")
    SafeConsole(file=Broken(slave)).print("step 1")
    os.close(master)
    os.close(slave)


def test_a_log_on_a_full_disk_ends_no_command() -> None:
    with open("/dev/full", "w") as stream:
        console = SafeConsole(file=stream, stderr=True)
        console.print("step 1")
        console.print("step 2")
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # there is room again


def test_closed_standard_streams_are_the_null_device(tiny_file: Path) -> None:
    """Otherwise the next file that is opened would get what is printed."""
    words = f"RANK=0 WORLD_SIZE=1 {sys.executable} -m leaven show {tiny_file} >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", words], check=False).returncode == 0
    child = "import os, subprocess, sys; from leaven.cli import _open_standard_streams as go; go(); "
    child += "sys.exit(subprocess.run(['sh', '-c', 'echo x 2>&1 >&2 <&0'], check=False).returncode)"
    assert subprocess.run(["sh", "-c", f'{sys.executable} -c "{child}" >&- 2>&- <&-'], check=False).returncode == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"WORLD_SIZE": "x", "RANK": "x"}, "the environment variable WORLD_SIZE is 'x', not a number above 0"),
        ({"WORLD_SIZE": "-1"}, "the environment variable WORLD_SIZE is '-1', not a number above 0"),
        ({"WORLD_SIZE": "0"}, "the environment variable WORLD_SIZE is '0', not a number above 0"),
        ({"WORLD_SIZE": "2"}, "environment variable RANK expected, but not set; start the run with torchrun --nproc"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "abc"}, "'abc'; start the run"),
    ],
)
def test_wrong_variables_of_torchrun_are_one_line(
    wrong: dict[str, str], message: str, tiny_file: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "leaven", "train", str(tiny_file), "--run", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--set", "layout.dp=2"], env=os.environ | wrong, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_bug_is_one_line_that_names_a_file_to_report_it_with(broken: Verb, tmp_path: Path) -> None:
    code, out, err = broken("tune", "x.toml", "--study", f"postgresql://me:{PASSWORD}@host/db")
    (file,) = tmp_path.iterdir()
    assert (code, out) == (BUG, "")
    assert err == (
        "error: a bug in leaven: ZeroDivisionError: \\u001b[31m in a line, of postgresql://user:***@host; please "
        f"remove private data from the file {file}, and report the bug with this file\n"
    )
    report = file.read_text()
    assert "leaven tune x.toml" in report
    assert "in bug" in report
    assert "ZeroDivisionError" in report
    assert PASSWORD not in report
    assert "\x1b" not in report
    assert file.stat().st_mode & 0o077 == 0


def test_a_panic_of_a_library_and_a_bug_of_another_process_are_shown(
    leaven: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class PanicException(BaseException):
        """As tokenizers and safetensors raise it."""

    def panic(**_: object) -> None:
        raise PanicException("capacity overflow")

    monkeypatch.setattr("leaven.cli.app", panic)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for quiet in (False, True):  # only the first process of several prints other errors
        monkeypatch.setattr(errors, "quiet", quiet)
        code, _, err = leaven("train")
        assert code == BUG
        assert err.startswith("error: a bug in leaven: PanicException: capacity overflow")


def test_a_bug_whose_file_cannot_be_written_says_how_to_see_it(broken: Verb, tmp_path: Path) -> None:
    tmp_path.rmdir()
    code, _, err = broken("show")
    tmp_path.mkdir()
    assert code == BUG
    assert f"run the command again with {DEBUG}=1" in err
    assert len(err.splitlines()) == 1


def test_the_variable_for_debugging_shows_the_traceback(broken: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(ZeroDivisionError):
        broken("show")


def test_a_removed_current_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")
    assert error_message(missing) is None
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "type cd with a folder" in str(error_message(missing))


def test_errors_of_the_file_system_say_what_to_do_and_those_of_memory_give_no_wrong_advice() -> None:
    assert error_message(PermissionError(13, "Permission denied", "a")) == (
        "a: permission denied; use another path, or allow leaven to read and write it"
    )
    for number in (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENXIO):
        assert "; check that the disk is mounted" in str(error_message(OSError(number, os.strerror(number), "a")))
    assert error_message(OSError(errno.EBADF, "Bad file descriptor", "a")) is None
    assert "use smaller files" in str(error_message(MemoryError()))
    for error in (BlockingIOError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread")):
        assert "allows no further process or thread" in str(error_message(error))


def _denied() -> list[str]:
    """Return the start of a command that obeys permissions, which root otherwise does not."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root, and no setpriv")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("show closed/tiny.toml", "closed/tiny.toml: permission denied"),
        ("report RUN -o RUN/x.html", "RUN/x.html: cannot be written: Permission denied"),
        pytest.param(
            "train RUN/recipe.toml --run RUN --rewind-to 5120", "RUN: permission denied", marks=pytest.mark.slow
        ),
    ],
)
def test_missing_permissions_are_one_line(
    tmp_path: Path, tiny_text: str, scaled_run: Path, command: str, says: str
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed/tiny.toml").write_text(tiny_text)
    shutil.copytree(scaled_run, tmp_path / "RUN", ignore=shutil.ignore_patterns(".lock"))
    for folder, mode in (("closed", 0o000), ("RUN", 0o500)):
        (tmp_path / folder).chmod(mode)
    words = [*_denied(), sys.executable, "-m", "leaven", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    for folder in ("closed", "RUN"):
        (tmp_path / folder).chmod(0o700)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert says in line
    assert not (tmp_path / "RUN/x.html").exists()


@pytest.mark.long
def test_characters_that_the_terminal_lacks_are_escaped(tmp_path: Path, tiny_text: str) -> None:
    name = "t\u00edny\U00020000"
    (tmp_path / "r.toml").write_text(tiny_text.replace('"tiny"', f'"{name}"'), encoding="utf-8")

    def shown_with(encoding: str, *options: str) -> str:
        words = [sys.executable, "-m", "leaven", "show", "r.toml", *options]
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(words, capture_output=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(encoding)

    assert shown_with("ascii").startswith("t\\xedny\\U00020000")
    assert json.loads(shown_with("cp1252", "--json"))["name"] == name


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_device_stays_one_and_a_pipe_gets_the_page(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
    write_page(Path("/dev/null"), "page")
    if not os.geteuid():
        device = tmp_path / "null"
        os.mknod(device, 0o600 | 0o020000, os.makedev(1, 3))
        write_text(device, "page")
        assert device.is_char_device()


def test_a_page_goes_to_the_standard_output_of_a_shell(tmp_path: Path) -> None:
    """Where /dev/stdout is a link to a file, the file is written, and neither is replaced."""
    code = "from leaven.storage import write_text; write_text('/dev/stdout', 'page')"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "page"
    assert Path("/dev/stdout").is_symlink()
