"""notebooks/: each has the cells of its script and outputs without an error, and runs from a fresh
kernel.
"""

import json
import re
from pathlib import Path

import pytest

from tests import running

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("[0-9]*.py"))
MOST_SECONDS = 180  # of all cells, on two cores


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
    assert notebook["metadata"]["armature"]["seconds"] <= MOST_SECONDS


@pytest.mark.parametrize(
    "number",
    [
        "1",  # 40–47 s
        pytest.param("2", marks=pytest.mark.slow),  # 98 s
        pytest.param("3", marks=pytest.mark.slow),  # 42–78 s
    ],
)
@pytest.mark.timeout(600)
def test_a_notebook_runs_from_a_fresh_kernel(number):
    pytest.importorskip("jupytext")
    running.python("scripts/notebooks.py", "--check", number, timeout=600)
