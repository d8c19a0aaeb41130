"""The tables of docs/faults.md."""

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version

from tests import running
from tests.faults.cells import Column
from tests.faults.matrix import Cell, Fault

PAGE = running.ROOT / "docs" / "faults.md"


def table(cells: Sequence[Cell], faults: Sequence[Fault], columns: Sequence[Column]) -> str:
    found = {(cell.fault, cell.column): cell for cell in cells}
    lines = ["| | " + " | ".join(column.name for column in columns) + " |", "| --- |" + " --- |" * len(columns)]
    for fault in faults:
        texts = [found[fault.name, column.name].text.replace("|", "\\|").replace("\n", " ") for column in columns]
        lines.append(f"| {fault.title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def heading(seconds: float) -> str:
    """When, with what and on what the figures were made."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "deepspeed"))
    return (
        f"{date.today().isoformat()}, Python {platform.python_version()}, {versions}, {os.cpu_count()} cores "
        f"({processor()}), {seconds / 60:.0f} min."
    )


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def write(section: str, text: str) -> None:
    """Replace what stands between `<!-- section: begin -->` and `<!-- section: end -->`."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert rest, f"{PAGE} has no {begin}"
    assert after, f"{PAGE} has no {end}"
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
