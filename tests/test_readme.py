"""The README's diffs, options and commands are the real ones. `python tests/test_readme.py` writes them anew."""
import contextlib
import io
import re
import subprocess

import pytest
from conftest import ROOT, SCRIPTS, launch
from torch.distributed.run import get_args_parser

import common

README = ROOT / "README.md"
MARK = r"<!-- {} -->\n.*?<!-- end -->\n"


def real_diff(old, new):
    command = ["diff", "-U1", "-F", "# --", "--label", old, "--label", new, ROOT / old, ROOT / new]
    return f"```diff\n{subprocess.run(command, capture_output=True, text=True).stdout}```\n"


def options():
    """For each option of the parser: its name, its choices and what --help says of it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "500")
        common.parse_args("single_gpu.py", ["--help"])
    return re.findall(r"^  (--[\w-]+) ?({.*?})?.*?\s{2,}(\S.*)$", out.getvalue(), re.MULTILINE)


def real_options():
    rows = "".join(f"| `{name}` | {choices[1:-1].replace(',', ', ')} | {text} |\n" for name, choices, text in options())
    return f"| option | choices | meaning (default) |\n|---|---|---|\n{rows}"


def generated():
    """Each part of the README that is written by this file: its mark and what has to stand there."""
    pairs = [("single_gpu.py", "dataparallel.py"), ("single_gpu.py", "ddp_spawn.py"), ("ddp_spawn.py", "ddp_torchrun.py")]
    return {"options": real_options(), **{f"diff {old} {new}": real_diff(old, new) for old, new in pairs}}


@pytest.mark.parametrize("name", generated())
def test_what_is_generated_is_up_to_date(name):
    part = f"<!-- {name} -->\n{generated()[name]}<!-- end -->\n"
    assert part in README.read_text(), "run: python tests/test_readme.py"


def test_every_option_stands_in_the_table():
    args = vars(common.parse_args("single_gpu.py", []))
    assert {name[2:].replace("-", "_") for name, *_ in options()} == args.keys() - {"script"}


def test_the_defaults_that_help_names_are_the_real_ones():
    args = common.parse_args("single_gpu.py", [])
    for name, _, text in options():
        value, told = getattr(args, name[2:].replace("-", "_")), re.search(r"\(([^()]*)\)$", text)
        if value and value is not True and told and not re.search("GPUs|synthetic", told[1]):
            assert str(value) in told[1] or float(re.search(r"[\d.]+", told[1])[0]) == value, name
    texts = {name: text for name, _, text in options()}
    for data, defaults in common.DEFAULTS.items():
        for option in ("image_size", "epochs", "weight_decay"):
            told = re.search(rf"([\d.e-]+) {data}", texts["--" + option.replace("_", "-")])[1]
            assert float(told) == defaults[option], option


def test_commands_use_real_options_and_real_files():
    known = {name for name, *_ in options()}
    text = re.sub(MARK.format(".*?"), "", README.read_text(), flags=re.DOTALL)
    for arguments in re.findall(r"(?:single_gpu|dataparallel|ddp_spawn|ddp_torchrun)\.py((?: +[^\s`|]+)*)", text):
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", arguments)) <= known, arguments
    torchruns = {name for action in get_args_parser()._actions for name in action.option_strings}
    others = {"--gpus", "--ipc", "--shm-size", "--network"}  # docker's
    text = re.sub("^#SBATCH.*$", "", text, flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known | torchruns | others
    assert all((ROOT / name).exists() for name in re.findall(r"`?((?:tests/)?\w+\.(?:py|txt))\b", text))
    assert all(script in text for script in SCRIPTS)


def test_the_tests_that_it_names_exist():
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = re.findall(r"`(?:tests/(test_\w+\.py)::)?(test_\w+)`", README.read_text())
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (sources[file] if file else "".join(sources.values())), test


def test_the_examples_fit_the_files_that_they_change():
    text = re.sub(MARK.format(".*?"), "", README.read_text(), flags=re.DOTALL)
    examples = re.findall(r"```diff\n--- (\S+)\n.*?\n(@@.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 3
    for file, hunks in examples:
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] != "+")
            assert (ROOT / file).read_text().count(old) == 1, old


@pytest.mark.slow
def test_the_table_of_losses_is_that_of_a_real_run(tmp_path):
    text = README.read_text()
    options = re.search(r"losses\s+below are from `(--norm group [^`]*) --log-every 16`", text)[1].split()
    rows = re.findall(r"^\| (\d+)" + r" \| (\d\.\d{14})" * 4 + r" \|$", text, re.MULTILINE)
    assert rows
    for column, script in enumerate(SCRIPTS, start=1):
        (folder := tmp_path / script).mkdir()
        losses = launch(folder, script, *options).losses
        for row in rows:
            end = int(row[0])  # a line tells the mean since the last one; here there is one for every step
            assert sum(losses[end - 16 : end]) / 16 == pytest.approx(float(row[column]), abs=1e-8)


def test_ci_runs_the_readmes_test_command():
    assert len(re.findall(r"python -m pytest$", README.read_text(), re.MULTILINE)) == 1
    assert "grep 'python -m pytest$' README.md" in (ROOT / ".ci/run").read_text()


if __name__ == "__main__":
    text = README.read_text()
    for name, part in generated().items():
        text = re.sub(MARK.format(re.escape(name)), lambda _: f"<!-- {name} -->\n{part}<!-- end -->\n", text, flags=re.DOTALL)
    README.write_text(text)
