"""Print how large each part of the project is, and its limits.

python scripts/size.py        the table of make size
python scripts/size.py src    files, lines and tokens of these folders or files instead

A token counts unless it is a comment, a docstring, a line break or an indentation, so wide lines
hide nothing. `today` is held by tests/test_budget.py: lower it when a part has become smaller, and
raise it only for a reason that the commit gives. `goal` is where the part is to arrive.
"""

import argparse
import ast
import io
import re
import token
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100  # columns
SLACK = 0.03  # of a limit: a part that is smaller by more has a limit to lower
OPTIONAL = (  # what a run can do without; the rest of src/armature is the core
    "command",
    "finetune",
    "data/chat",
    "models/huggingface",
    "models/timm",
    "planning",
    "doctor",
    "proof",
    "pages",
    "sweeps",
)
OF_EVERY_CLONE = {"armature", "example", "hydra_plugins"}  # in src/; others are a user's own
PRIVATE_NAMES = "tests/test_private_api.py"
_LAYOUT = {token.COMMENT, token.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER}
# since Python 3.12 an f-string is several tokens; it counts as one, as before
_F_STRING = (getattr(token, "FSTRING_START", -1), getattr(token, "FSTRING_END", -1))
_PRAGMA = re.compile(r"\s*#\s*(pyright|noqa|fmt)\b.*")  # belongs at the end of its line


class Limit(NamedTuple):
    today: int
    goal: int


LIMITS = {
    "core": Limit(189_370, 145_000),
    "optional": Limit(79_950, 60_000),
    "scripts, benchmarks": Limit(26_360, 26_360),
    "tests": Limit(247_830, 220_000),
    "documentation": Limit(21_050, 21_050),
    "private names": Limit(158, 110),
    "wide lines": Limit(0, 0),
}
UNITS = {"documentation": "words", "private names": "rows", "wide lines": "lines"}  # else tokens


class Size(NamedTuple):
    files: int
    lines: int
    amount: int  # in the part's unit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files to count instead")
    paths = parser.parse_args().paths
    print(f"{'part':<28}{'files':>7}{'lines':>9}{'size':>10}{'today':>10}{'goal':>9}")
    if paths:
        for path in paths:
            size = code_size(sorted(path.rglob("*.py")) if path.is_dir() else [path])
            print(f"{path!s:<28}{size.files:>7,}{size.lines:>9,}{size.amount:>10,}")
        return
    sizes = measure()
    for part, size in sizes.items():
        limit, name = LIMITS[part], f"{part} ({UNITS.get(part, 'tokens')})"
        print(
            f"{name:<28}{size.files:>7,}{size.lines:>9,}{size.amount:>10,}"
            f"{limit.today:>10,}{limit.goal:>9,}"
        )
    for line in [*problems(sizes), *hints(sizes)]:
        print(line)


def measure() -> dict[str, Size]:
    """Return the size of each part in `LIMITS`."""
    library = _code("src/armature")
    folders = [ROOT / "src/armature" / name for name in OPTIONAL]
    optional = {path for path in library if any(folder in path.parents for folder in folders)}
    own = [path.name for path in (ROOT / "src").iterdir() if path.name not in OF_EVERY_CLONE]
    tests = [path for path in _code("tests") if path.stem not in {f"test_{name}" for name in own}]
    others = _code("scripts") + _code("benchmarks")
    examples = [ROOT / "train.py", *_code("notebooks"), *_code("src/example")]
    plugins = _code("src/hydra_plugins")
    pages = [ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    pages += [*sorted((ROOT / "docs").glob("*.md")), ROOT / "src/armature/README.md"]
    return {
        "core": code_size(path for path in library if path not in optional),
        "optional": code_size([*sorted(optional), *plugins]),
        "scripts, benchmarks": code_size(others),
        "tests": code_size(tests),
        "documentation": _size(pages, lambda text: len(text.split())),
        "private names": _size([ROOT / PRIVATE_NAMES], private_names),
        "wide lines": _size([*library, *plugins, *others, *tests, *examples], wide_lines),
    }


def problems(sizes: dict[str, Size]) -> list[str]:
    """Return a line for each part that is larger than its limit of today."""
    return [
        f"{part}: {size.amount:,} {UNITS.get(part, 'tokens')} are more than the limit of "
        f"{LIMITS[part].today:,}. Delete or simplify something there (python scripts/size.py "
        "FOLDER counts a folder), or raise the limit in scripts/size.py and say why."
        for part, size in sizes.items()
        if size.amount > LIMITS[part].today
    ]


def hints(sizes: dict[str, Size]) -> Iterator[str]:
    """Yield a line for each part that has become clearly smaller than its limit."""
    for part, size in sizes.items():
        if size.amount < (1 - SLACK) * LIMITS[part].today:
            yield f"{part}: lower the limit to {size.amount:,} in scripts/size.py."


def code_size(paths: Iterable[Path]) -> Size:
    """Return the size of Python files in tokens."""
    return _size(paths, tokens)


def tokens(text: str) -> int:
    """Return the number of tokens of a Python file without comments, docstrings and layout."""
    docstrings = {_docstring(node) for node in ast.walk(ast.parse(text))}
    count = depth = 0
    for each in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= each.type == _F_STRING[1]
        if depth == 0 and each.type not in _LAYOUT and each.type != _F_STRING[0]:
            count += each.start not in docstrings
        depth += each.type == _F_STRING[0]
    return count


def _docstring(node: ast.AST) -> tuple[int, int] | None:
    """Return the line and column at which a module, class or function's docstring begins."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    first = node.body[0] if node.body else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    return (first.lineno, first.col_offset) if isinstance(first.value.value, str) else None


def wide_lines(text: str) -> int:
    """Return the number of lines wider than WIDTH, without comments that steer tools."""
    return sum(len(_PRAGMA.sub("", line)) > WIDTH for line in text.splitlines())


def private_names(text: str) -> int:
    """Return the number of rows in the tables of private names, which are the file's lists."""
    values = (getattr(statement, "value", None) for statement in ast.parse(text).body)
    return sum(len(value.elts) for value in values if isinstance(value, ast.List))


def _code(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def _size(paths: Iterable[Path], count: Callable[[str], int]) -> Size:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return Size(len(texts), sum(len(text.splitlines()) for text in texts), sum(map(count, texts)))


if __name__ == "__main__":
    main()
