"""notebooks/: each has the cells of its script and outputs without an error, and one runs from a
fresh kernel.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
TOOLS = ROOT / ".venv-notebooks" / "bin" / "python"


def cells(script: Path) -> list[tuple[str, str]]:
    """The cells of a script in jupytext's percent format."""
    found = []
    for part in re.split(r"^# %%", script.read_text(), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            found.append(("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip()))
        else:
            found.append(("code", body.strip()))
    return found


def test_there_are_five():
    assert [script.name[0] for script in SCRIPTS] == [*"12345"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_has_the_cells_of_its_script_and_their_outputs(script):
    notebook = json.loads(script.with_suffix(".ipynb").read_text())
    written = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    assert written == cells(script), f"{script.name} was changed: type make notebooks"
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert len(outputs) >= 5
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert str(ROOT) not in json.dumps(notebook), "a path of the machine that made it"
    assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="make notebooks creates .venv-notebooks")
def test_a_notebook_runs_from_a_fresh_kernel():
    command = [str(TOOLS), str(ROOT / "scripts" / "notebooks.py"), "--check", "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="make notebooks creates .venv-notebooks")
def test_a_committed_notebook_that_took_more_than_two_minutes_is_a_problem(tmp_path):
    for seconds in (100, 121):
        notebook = {
            "cells": [],
            "metadata": {"armature": {"seconds": seconds}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (tmp_path / f"{seconds}.ipynb").write_text(json.dumps(notebook))
    call = (
        "import sys, pathlib, notebooks; print([notebooks.too_slow(pathlib.Path(n)) for n in "
        "sys.argv[1:]])"
    )
    command = [str(TOOLS), "-c", call, str(tmp_path / "100.ipynb"), str(tmp_path / "121.ipynb")]
    result = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True)
    expected = (
        "[[], ['121.ipynb took 121 s, more than 120 s. On an idle machine type make notebooks']]"
    )
    assert result.stdout.strip() == expected, result.stderr
