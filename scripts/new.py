"""Start your own model, data and task: copy the example under a name of yours.

python scripts/new.py moons     writes src/moons/, configs/*/moons.yaml and tests/test_moons.py
armature new moons              outside of a project: a folder moons/ with these, which is one

Then: python train.py experiment=moons
"""

import importlib.util
import keyword
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from armature import cli
from armature.errors import ConfigError
from armature.project import IMPORTED, PACKAGE, ROOT, SHIPPED

sys.path[:0] = IMPORTED  # where a name could be taken

GROUPS = ("model", "data", "task", "experiment")
TEST = '''\
"""The experiment passes the checks, learns, and gives the same losses under another strategy."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import armature

ROOT = Path(__file__).parents[1]
NAME = "example"
FIXED = [
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=20",
    "run.name=run",
]


def losses(folder, *overrides):
    command = [sys.executable, "train.py", f"experiment={NAME}", *FIXED, *overrides]
    # started where you type it, so that paths of data are the same
    subprocess.run([*command, f"run.root={folder}"], cwd=ROOT, check=True)
    with (folder / "run" / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def test_it_passes_the_checks():
    assert armature.compose(f"experiment={NAME}").model._target_.startswith(f"{NAME}.")


@pytest.mark.slow
def test_it_learns_and_the_strategy_does_not_change_it(tmp_path):
    single = losses(tmp_path / "single")
    assert single[-1] < single[0]
    assert losses(tmp_path / "ddp", "strategy=ddp", "trainer.devices=2") == pytest.approx(
        single, rel=1e-5
    )
'''


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "name", help="of the Python package and of the configs: lower case, such as moons"
    )
    name = parser.parse_args().name
    root = ROOT if (ROOT / "configs" / "train.yaml").is_file() else Path.cwd() / name
    try:
        files = texts(name, root)
    except ConfigError as error:
        cli.refuse(error.problems)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(os.path.relpath(path))
    if root != ROOT:
        print(f"\nnext: cd {name} && make train")
        return
    print(f"\nnext: python train.py experiment={name}")
    print(
        f"      make test-fast ARGS=tests/test_{name}.py      # installs pytest, and checks the "
        "configuration"
    )
    print(
        f"      .venv/bin/python -m pytest tests/test_{name}.py   # then this also trains, alone "
        "and under ddp"
    )
    print("docs/your-own.md explains each part.")


def texts(name: str, root: Path = ROOT) -> dict[Path, str]:
    """Return the files to write into a project, with their text; into one that does not exist yet,
    those of its own as well.

    ConfigError: all that is wrong with the name.
    """
    if problems := name_problems(name, root):
        raise ConfigError(problems)
    source, target = PACKAGE.parent / "example", root / "src" / name
    configs = {group: SHIPPED / group / "example.yaml" for group in GROUPS}
    gone = [
        os.path.relpath(path, ROOT) for path in (source, *configs.values()) if not path.exists()
    ]
    if gone:
        raise ConfigError(
            f"NAME={name}: {', '.join(gone)} is gone, which this command copies. Take it from the "
            "commit that had it: git checkout COMMIT -- src/example 'configs/*/example.yaml'."
        )
    copies = {target / path.name: path for path in sorted(source.glob("*.py"))}
    copies |= {root / "configs" / group / f"{name}.yaml": path for group, path in configs.items()}
    if root != ROOT:
        own = filter(Path.is_file, Path(__file__).with_name("project").iterdir())
        copies |= {root / path.name: path for path in own}
        of_all = [SHIPPED / "train.yaml", *(SHIPPED / ".schema").iterdir()]
        copies |= {root / "configs" / path.relative_to(SHIPPED): path for path in of_all}
    found = {copy: path.read_text(encoding="utf-8") for copy, path in copies.items()}
    found[target / "__init__.py"] = '"""The parts of experiment=example."""\n'
    found[root / "tests" / f"test_{name}.py"] = TEST
    if root != ROOT:
        train = found[root / "configs" / "train.yaml"]
        train = train.replace("experiment: null", "experiment: example")
        found[root / "configs" / "train.yaml"] = train.replace("name: armature", "name: example")
    return {path: renamed(text, name) for path, text in found.items()}


def renamed(text: str, name: str) -> str:
    """Return a text of the example under the name, its imports of our packages in the order that
    ruff wants.
    """
    text = re.sub(r"\bexample\b", name, text)
    imports = rf"(?:^from (?:armature|{name})\b.*\n)+"
    return re.sub(
        imports,
        lambda found: "".join(sorted(found[0].splitlines(keepends=True))),
        text,
        flags=re.MULTILINE,
    )


def name_problems(name: str, root: Path) -> list[str]:
    """Return every reason why neither a Python package nor a configuration can have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        form = "letters a to z, digits and '_', a letter first, and no keyword of Python"
        return [
            f"NAME={name}: must be a name that Python can import: {form}. Type make new NAME=moons."
        ]
    made = [root / "src" / name, *(root / "configs" / group / f"{name}.yaml" for group in GROUPS)]
    made += [root / "tests" / f"test_{name}.py", *(root / "tests").glob(f"*/test_{name}.py")]
    made += [root] * (root != ROOT)
    taken = [os.path.relpath(path, ROOT) for path in made if path.exists()]
    if taken:
        return [f"NAME={name}: {', '.join(taken)} exists already. Type another name."]
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        return [
            f"NAME={name}: import {name} finds another package already. Type another name, such as "
            f"my_{name}."
        ]
    return []


if __name__ == "__main__":
    main()
