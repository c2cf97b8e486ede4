"""The four scripts differ in their strategy and in nothing else, and each difference carries the number of its idea."""
import re
import subprocess

import pytest
from conftest import ROOT, SCRIPTS

SOURCES = {script: (ROOT / script).read_text().splitlines() for script in SCRIPTS}
CHANGE = re.compile(r"# CHANGE (\d+): \S+")


def diff(old, new):
    """The hunks of `diff old new`, each as its header and its lines."""
    out = subprocess.run(["diff", ROOT / old, ROOT / new], capture_output=True, text=True).stdout
    return [hunk.splitlines() for hunk in re.split(r"^(?=\d)", out, flags=re.MULTILINE)[1:]]


@pytest.mark.parametrize("old, new, budget", [
    ("single_gpu.py", "dataparallel.py", 12), ("single_gpu.py", "ddp_spawn.py", 75), ("ddp_spawn.py", "ddp_torchrun.py", 40)])
def test_a_diff_stays_short(old, new, budget):
    assert sum(line[0] in "<>" for hunk in diff(old, new) for line in hunk) <= budget


def test_files_stay_short():
    assert max(map(len, SOURCES.values())) <= 110
    assert sum(map(bool, (ROOT / "common.py").read_text().splitlines())) <= 450  # blank lines are free


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_every_difference_to_the_baseline_says_which_idea_it_is(script):
    imports = SOURCES["single_gpu.py"].index("import common") + 1
    hunks = [hunk for hunk in diff("single_gpu.py", script) if int(re.match(r"\d+", hunk[0])[0]) > imports]
    numbered = [[line[2:] for line in hunk if line[0] == ">" and CHANGE.search(line)] for hunk in hunks]
    assert all(numbered), hunks
    assert sum(numbered, []) == [line for line in SOURCES[script] if "CHANGE" in line]


def test_the_baseline_has_no_changes_and_every_script_has_the_same_sections():
    assert not any("CHANGE" in line for line in SOURCES["single_gpu.py"])
    sections = [[line for line in lines if "# -- " in line] for lines in SOURCES.values()]
    assert all(section == sections[0] for section in sections) and len(sections[0]) == 5


def test_a_number_means_the_same_idea_in_every_script():
    """The two DDP scripts word an idea alike, but for 1, which is about who starts the processes."""
    spawn, torchrun = ({CHANGE.search(line)[1]: line[line.index("# CHANGE"):] for line in SOURCES[script] if CHANGE.search(line)}
                       for script in ("ddp_spawn.py", "ddp_torchrun.py"))
    assert {n: line for n, line in spawn.items() if n != "1"} == {n: line for n, line in torchrun.items() if n != "1"}
    assert sorted(spawn) == sorted(torchrun) == [str(number) for number in range(1, 9)]


def test_only_the_bare_module_is_evaluated_and_saved():
    for lines in SOURCES.values():
        uses = [line for line in lines if "evaluate(" in line or "save_checkpoint(" in line or "load_checkpoint(" in line]
        assert len(uses) == 4 and all(re.search(r"\bmodel\b", line) and "train_model" not in line for line in uses)
