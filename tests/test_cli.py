"""The command line: errors are one line and exit status 2, imports stay lazy, Ctrl-C is 130."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dsspark
from dsspark import cli


def one_line(capsys):
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def no_measuring(monkeypatch):
    """Make anything past the checks of the arguments fail loudly."""

    def refuse():
        raise AssertionError("the models were loaded although an argument is wrong")

    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", refuse)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"dsspark {dsspark.__version__}\n"


def test_importing_the_command_line_imports_no_command():
    code = (
        "import sys, dsspark.cli; print([m for m in sys.modules if m.startswith(('matplotlib', 'rich', 'hypothesis', 'scipy', "
        "'dsspark.demo', 'dsspark.training', 'dsspark.testing'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: dsspark {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], "command"),
        (["dance"], "dance"),
        (["demo", "--domain", "poetry"], "--domain"),
        (["demo", "--seed", "x"], "--seed"),
        (["demo", "--prompt", "a", "--prompt-file", "b"], "not allowed with"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, names, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert names in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--prompt", ""], "--prompt"),
        (["--prompt", "a", ""], "--prompt"),
        (["--prompt", "x" * 5000], "--prompt"),
        (["--prompt-file", "missing.txt"], "no such file"),
        (["--prompt-file", "."], "is a directory"),
        (["--prompt-file", "empty"], "--prompt-file"),
        (["--prompt-file", "long"], "more than"),
        (["--out", "empty"], "--out"),
        (["--out", "empty/deeper"], "--out"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "100000"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--seed", "-1"], "--seed"),
    ],
)
@pytest.mark.usefixtures("no_measuring")
def test_a_bad_argument_of_the_demo_is_named_before_anything_runs(words, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "long").write_bytes(b"x" * 100_000)
    out = [] if "--out" in words else ["--out", "out"]
    assert cli.main(["demo", *words, *out]) == 2
    line = one_line(capsys)
    assert line.startswith("dsspark: error: ")
    assert names in line
    assert "expected" in line


def test_missing_weights_are_one_line(monkeypatch, tmp_path, capsys):
    def missing():
        raise FileNotFoundError("weights: got no target.safetensors,\nexpected the shipped weights")

    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", missing)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "no target.safetensors, expected" in one_line(capsys)


def test_traceback_shows_where(monkeypatch, tmp_path, capsys):
    def missing():
        raise FileNotFoundError("no weights")

    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", missing)
    assert cli.main(["--traceback", "demo", "--out", str(tmp_path)]) == 2
    assert "in missing" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(monkeypatch, tmp_path):
    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", lambda: {}["fault"])
    with pytest.raises(KeyError):
        cli.main(["demo", "--out", str(tmp_path)])


def test_control_c_exits_130(monkeypatch, tmp_path, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("dsspark.models.pretrained.load_pretrained", interrupt)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130
    assert "interrupted" in one_line(capsys)


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1)])
def test_the_status_is_the_commands(returned, status, monkeypatch):
    monkeypatch.setattr("dsspark.demo.command.run", lambda args: returned)
    assert cli.main(["demo"]) == status


def test_a_reader_that_leaves_is_no_error():
    code = (
        "import sys; from dsspark import cli; import dsspark.demo.command as c\n"
        "c.run = lambda args: print('x' * 10**6)\n"
        "sys.exit(cli.main(['demo']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == cli.EXIT_BROKEN_PIPE
