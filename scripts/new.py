"""Start your own model, data and task: copy the example under a name of yours.

python scripts/new.py moons     writes src/moons/, configs/*/moons.yaml and tests/test_moons.py

Then: python train.py experiment=moons
"""

import argparse
import importlib.util
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # where a name could be taken

from armature import cli
from armature.errors import ConfigError

GROUPS = ("model", "data", "task", "experiment")
LONGEST = 60  # characters of a name, which names files
VALUES = (
    "null",
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "y",
    "n",
    "nan",
    "inf",
    "none",
    "default",
)
TEST = '''\
"""The experiment passes the checks, learns, and gives the same losses under another strategy."""

import sys

import pytest

import armature
from tests import running

NAME = "example"
FIXED = [
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=20",
    "run.name=run",
]


def losses(folder, *overrides, ranks=1):
    command = [sys.executable, "train.py", f"experiment={NAME}", *FIXED, *overrides]
    command += [f"trainer.devices={ranks}", f"run.root={folder}"]
    # started where you type it, so that paths of data are the same
    result = running.run(command, cwd=running.ROOT, env=running.environment(), ranks=ranks)
    assert result.returncode == 0, result.stderr[-6000:]
    return running.losses(folder / "run")


def test_it_passes_the_checks():
    assert armature.compose(f"experiment={NAME}").model._target_.startswith(f"{NAME}.")


@pytest.mark.slow
def test_it_learns_and_the_strategy_does_not_change_it(tmp_path):
    single = losses(tmp_path / "single")
    assert single[-1] < single[0]
    assert losses(tmp_path / "ddp", "strategy=ddp", ranks=2) == pytest.approx(single, rel=1e-5)
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name", help="of the Python package and of the configs: lower case, such as moons"
    )
    name = parser.parse_args().name
    try:
        files = texts(name)
    except ConfigError as error:
        cli.refuse(error.problems)
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
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


def texts(name: str) -> dict[Path, str]:
    """Return the files to write, with their text. ConfigError: all that is wrong with the name."""
    if problems := name_problems(name):
        raise ConfigError(problems)
    source, target = ROOT / "src" / "example", ROOT / "src" / name
    copies = {target / path.name: path for path in sorted(source.glob("*.py"))}
    for group in GROUPS:
        folder = ROOT / "configs" / group
        copies[folder / f"{name}.yaml"] = folder / "example.yaml"
    found = {copy: path.read_text(encoding="utf-8") for copy, path in copies.items()}
    found[target / "__init__.py"] = '"""The parts of experiment=example."""\n'
    found[ROOT / "tests" / f"test_{name}.py"] = TEST
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


def name_problems(name: str) -> list[str]:
    """Return every reason why neither a Python package nor a configuration can have this name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        form = "letters a to z, digits and '_', a letter first, and no keyword of Python"
        return [
            f"NAME={name}: must be a name that Python can import: {form}. Type make new NAME=moons."
        ]
    if len(name) > LONGEST:
        return [
            f"NAME={name[:20]}…: it has {len(name)} characters. Type a name of at most {LONGEST}."
        ]
    if name in VALUES:
        return [f"NAME={name}: experiment={name} would be read as a value. Type another name."]
    made = [ROOT / "src" / name, *(ROOT / "configs" / group / f"{name}.yaml" for group in GROUPS)]
    made += [ROOT / "tests" / f"test_{name}.py", *(ROOT / "tests").glob(f"*/test_{name}.py")]
    taken = [str(path.relative_to(ROOT)) for path in made if path.exists()]
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
