"""Execute the notebooks from their scripts, each from a fresh kernel, and write their outputs.

python scripts/notebooks.py            all
python scripts/notebooks.py 1 3        some
python scripts/notebooks.py --check    write nothing: do they still run?
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
    for path in chosen:
        execute(path, write=not args.check)


def execute(script: Path, *, write: bool) -> None:
    """Execute one notebook; raise CellExecutionError if a cell fails."""
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


if __name__ == "__main__":
    main()
