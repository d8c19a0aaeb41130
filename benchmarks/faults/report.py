"""The tables of `python -m benchmarks.faults`."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.faults.cells import Column
from benchmarks.faults.matrix import Cell, Fault


def table(cells: Sequence[Cell], faults: Sequence[Fault], columns: Sequence[Column]) -> str:
    found = {(cell.fault, cell.column): cell for cell in cells}
    lines = [
        "| | " + " | ".join(column.name for column in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for fault in faults:
        here = [found.get((fault.name, column.name)) for column in columns]
        texts = [
            cell.text.replace("|", "\\|").replace("\n", " ") if cell else "not run" for cell in here
        ]
        lines.append(f"| {fault.title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def keep(file: Path, cell: Cell) -> None:
    """Append a cell to the file of a table made in parts."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**asdict(cell), "output": ""}) + "\n")


def kept(file: Path) -> list[Cell]:
    """Return the newest result of each cell."""
    cells = [Cell(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({(cell.fault, cell.column): cell for cell in cells}.values())


def heading(seconds: float) -> str:
    """Return the date, versions, machine and duration of a measurement."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "deepspeed"))
    return (
        f"{date.today().isoformat()}, Python {platform.python_version()}, {versions}, "
        f"{os.cpu_count()} cores "
        f"({processor()}), {seconds / 60:.0f} min."
    )


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        return next(
            (line.split(":")[1].strip() for line in file if line.startswith("model name")),
            platform.machine(),
        )
