"""Execute the notebooks from their scripts, each from a fresh kernel, and write their outputs.

python scripts/notebooks.py            all
python scripts/notebooks.py 1 4        some
python scripts/notebooks.py --check    write nothing: do they still run, do scripts and notebooks
                                       agree, and did the cells of the committed one take less than
                                       two minutes?
"""

# pyright: reportMissingImports=false
import argparse
import sys
import time
from pathlib import Path

try:
    import jupytext
    import nbformat
    from nbclient import NotebookClient
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Type make notebooks, which installs it")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
CELL_SECONDS = 600  # after which a cell counts as hanging
MOST_SECONDS = (
    120  # of all cells of a notebook that is committed, on two cores; its metadata have the number
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", help="first characters of the names, such as 1")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    scripts = sorted(FOLDER.glob("[0-9]*.py"))
    chosen = [
        path for path in scripts if not args.numbers or path.name.startswith(tuple(args.numbers))
    ]
    if not chosen:
        parser.error(
            f"{' '.join(args.numbers)}: no such notebook. There are "
            f"{', '.join(p.stem for p in scripts)}"
        )
    problems = [problem for path in chosen for problem in execute(path, write=not args.check)]
    if problems:
        sys.exit("\n".join(problems))


def execute(script: Path, *, write: bool) -> list[str]:
    """Execute one notebook. Return what is wrong with the one on disk, unless it is written."""
    notebook, target = jupytext.read(script), script.with_suffix(".ipynb")
    started = time.monotonic()
    NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    seconds = time.monotonic() - started
    print(f"{target.name}: {seconds:.0f} s")
    notebook.metadata["armature"] = {"seconds": round(seconds)}
    clean(notebook)
    if write:
        nbformat.write(notebook, target)
        return []
    problems = (
        []
        if agree(script, target)
        else [f"{target.name} lags behind {script.name}. Type make notebooks"]
    )
    return problems + too_slow(target)


def too_slow(target: Path) -> list[str]:
    """Return the problem of a committed notebook whose cells took too long; an older one has no
    number.
    """
    seconds = nbformat.read(target, as_version=4).metadata.get("armature", {}).get("seconds", 0)
    if seconds <= MOST_SECONDS:
        return []
    return [
        f"{target.name} took {seconds} s, more than {MOST_SECONDS} s. On an idle machine type make "
        "notebooks"
    ]


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove what differs each time: ids, times of execution, versions of the kernel, this
    machine's paths.
    """
    notebook.metadata.pop("language_info", None)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "text" in output:
            output.text = output.text.replace(str(FOLDER.parent), "…")
        if "text/plain" in output.get("data", {}):
            output.data["text/plain"] = output.data["text/plain"].replace(str(FOLDER.parent), "…")
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata.pop("execution", None)


def agree(script: Path, target: Path) -> bool:
    """Return whether a notebook has the cells of its script."""

    def cells(path: Path) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source.strip()) for cell in jupytext.read(path).cells]

    return target.is_file() and cells(script) == cells(target)


if __name__ == "__main__":
    main()
