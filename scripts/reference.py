"""Print the page of all configuration keys, from the YAML files in configs/ and their comments."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
FIRST = (
    "trainer",
    "data",
    "strategy",
    "checkpoint",
    "launch",
    "optimizer",
    "scheduler",
    "model",
    "task",
)
OF_A_CLONE = ("project.name",)  # values that a clone sets
HEAD = """# Configuration

Made from the comments in `configs/`.
`python train.py --cfg job` prints the configuration of a command with all values, and `GROUP=NAME`
takes another file of a group. A key is typed with its group in front: `trainer.max_steps=100`.
"""


@dataclass(frozen=True)
class Key:
    name: str  # dotted, without the group
    value: str  # as written; empty for a section
    comment: str


def files() -> list[Path]:
    """Return the files of all groups."""
    found = sorted(CONFIGS.glob("*/*.yaml"))  # those in local/ are a user's own, which git ignores
    return [path for path in found if path.parent.name != "local" or path.stem == "example"]


def page(paths: list[Path]) -> str:
    """Return the whole page about these files."""
    groups = sorted({path.parent.name for path in paths})
    groups = [*FIRST, *(group for group in groups if group not in FIRST)]
    parts = [HEAD, "## Top level\n", *describe(CONFIGS / "train.yaml")]
    for group in groups:
        parts.append(f"\n## {group}\n")
        own = [path for path in paths if path.parent.name == group]
        for path in sorted(
            own, key=lambda path: (path.stem[0] != "_" and path.stem != "default", path.stem)
        ):
            parts += section(path)
    return "\n".join(parts).rstrip() + "\n"


def section(path: Path) -> list[str]:
    """Return the lines about one file, with its title."""
    group, of_all = path.parent.name, path.stem.startswith("_")
    title = f"of every {group}=…" if of_all else f"{group}={path.stem}"
    return [f"\n### {title}\n", *describe(path)]


def describe(path: Path) -> Iterator[str]:
    """Yield the lines of one file: its opening comment and a table of its keys."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = opening(lines)
    if head:
        yield f"{head}\n"
    found = list(keys(lines))
    if found:
        yield "| key | value | meaning |\n| --- | --- | --- |"
        for key in found:
            value = f"`{cell(key.value)}`" if key.value and key.name not in OF_A_CLONE else ""
            yield f"| `{key.name}` | {value} | {escape(key.comment)} |"
        yield ""


def opening(lines: list[str]) -> str:
    """Return the comment at the top of a file as Markdown; a command in it becomes code."""
    texts = []
    comment = "\n".join(
        line.removeprefix("#").strip()
        for line in itertools.takewhile(lambda x: x.startswith("#"), lines)
    )
    for text in comment.replace("\\\n", "").splitlines():
        if text and not text.startswith(("@package", "yaml-language")):
            texts.append(f"`{text}`" if text.startswith("python ") else escape(text))
    if texts and texts[0].startswith("`python ") and len(texts) > 1:
        texts[0] += "<br>"
    return "\n".join(texts)


def keys(lines: list[str]) -> Iterator[Key]:
    """Yield every key that has a value, or a comment, in the order of the file."""
    node = yaml.compose("\n".join(lines))
    if isinstance(node, yaml.MappingNode):
        start = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
        yield from walk(node, "", lines, start)


def walk(node: yaml.MappingNode, prefix: str, lines: list[str], start: int) -> Iterator[Key]:
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in ("defaults", "hydra"):
            continue
        row = key.start_mark.line
        comment = " ".join([*above(lines, row, start), *beside(lines, key, value)])
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            if comment:
                yield Key(name, "", comment)
            yield from walk(value, f"{name}.", lines, start)
        elif isinstance(value, yaml.SequenceNode) and not value.flow_style:
            yield Key(name, f"[{', '.join(item.value for item in value.value)}]", comment)
        else:
            yield Key(name, lines[row][value.start_mark.column : value.end_mark.column], comment)


def above(lines: list[str], row: int, start: int) -> list[str]:
    """Return the comment lines over a key, without the titles of sections and the file's opening
    comment.
    """
    texts: list[str] = []
    while row > start and lines[row - 1].lstrip().startswith("#"):
        row -= 1
        texts.insert(0, lines[row].lstrip().removeprefix("#").strip())
    is_title = len(texts) == 1 and re.fullmatch(r"[A-Z][\w ]{0,20}", texts[0])
    return [] if is_title else texts


def beside(lines: list[str], key: yaml.Node, value: yaml.Node) -> list[str]:
    """Return the comment behind a key's value, on the key's own line."""
    row = key.start_mark.line
    on_row = value.end_mark.line == row and (
        not isinstance(value, yaml.CollectionNode) or value.flow_style
    )
    rest = lines[row][value.end_mark.column if on_row else key.end_mark.column + 1 :].strip()
    return [rest.removeprefix("#").strip()] if rest.startswith("#") else []


def escape(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([*_<>\[\]|])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(files()), end="")
