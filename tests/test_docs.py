"""The pages of docs/ and the other documents: links, commands, paths and excerpts are true."""

import ast
import functools
import itertools
import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from armature import cli
from scripts import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = "docs/reference.md"  # `make docs` generates it
OTHERS = ("README", "AGENTS", "CONTRIBUTING", "CHANGELOG", "scripts/multinode/README")
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page != ROOT / REFERENCE]
PAGES += [ROOT / f"{name}.md" for name in OTHERS]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
TAKE_OVERRIDES = {
    f"{name}.py" for name in ("train", "plan", "simulate", "doctor", "show_batch", "prove")
} | {"train.sbatch", "run.sh"}
OWN_KEYS = ("hardware=", "out=")  # of a script, not of the configuration
FOLDERS = "src|configs|scripts|docs|benchmarks|kubernetes|tests"
MADE = re.compile(  # by users, and by runs
    r"(?:src|tests|configs/(?:\*|\w+))/(?:test_)?(?:mine|moons)\b.*|configs/local/default\.yaml"
)
# what the page about moving code over and the one with published runs say of other projects
ELSEWHERE = re.compile(
    r"src/(?:models|data|eval)\b.*|configs/(?:(?:model|data)/mnist|trainer/ddp|paths|extras|hydra"
    r"|callbacks/model_checkpoint|hparams_search)\b.*|.*torchtitan\.md"
)


def prose(text: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^    \S.*$", "", FENCE.sub("", text), flags=re.MULTILINE)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", prose(text))


@functools.cache
def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title) for title in titles]
    return {
        re.sub(r"[-\s]+", "-", title.strip().lower().encode("ascii", "ignore").decode())
        for title in plain
    }


def commands(text: str) -> list[str]:
    """The command lines of a page: in blocks of code, indented, and within sentences."""
    text = text.replace("\\\n", " ")
    blocks = [body for _, language, body in FENCE.findall(text) if language in ("", "bash")]
    blocks += re.findall(r"^    (\S.*)$", FENCE.sub("", text), re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    start = re.compile(
        r"\s*(?:[A-Z]+=\S+ )*(?:python |torchrun |sbatch |srun |kubectl |scripts/multinode/)"
    )
    typed = [whole(lines[i:]) for i, line in enumerate(lines) if start.match(line)]
    return typed + [" ".join(span.split()) for span in spans(text) if start.match(span)]


def whole(lines: list[str]) -> str:
    """The command that begins with the first line: an open quotation continues on the next ones."""
    for end in range(1, len(lines) + 1):
        command = "\n".join(lines[:end]).strip()
        with suppress(ValueError):
            shlex.split(command, comments=True)
            return command
    raise AssertionError(f"no closing quotation: {lines[0]}")


def after_script(command: str) -> tuple[Path | None, list[str]]:
    """The script of ours that a command runs, and the words after it."""
    words = [w for w in shlex.split(command, comments=True) if "…" not in w and "<" not in w]
    for i, word in enumerate(words):
        if word.endswith((".py", ".sh", ".sbatch")) and "=" not in word:
            return ROOT / word, words[i + 1 :]
    return None, words


def overrides_of(command: str) -> tuple[str, ...]:
    """What a command changes in the configuration of train.py, of a sweep its first trial."""
    script, after = after_script(command)
    if script is None or script.name not in TAKE_OVERRIDES:
        return ()
    found = []
    for word in after:
        key, is_override, value = word.partition("=")
        if not is_override or key.isupper() or word.startswith(("-", *OWN_KEYS)):
            continue
        if "-m" in after:
            value = re.sub(r"^(?:choice|range)\((.*)\)$", r"\1", value).split(",")[0]
        # the example stands for a user's own parts
        found.append(re.sub(r"=(mine|moons)$", "=example", f"{key}={value}"))
    return tuple(found)


CHOICES = re.findall(r"`(strategy=[^`]+)`", TEXTS["docs/strategies.md"].partition("## ")[0])
COMPOSED = {overrides_of(each) for text in TEXTS.values() for each in commands(text)}
COMPOSED |= {tuple(row.split()) for row in CHOICES}


@pytest.mark.parametrize("overrides", sorted(COMPOSED), ids=" ".join)
def test_every_command_composes(overrides):
    assert cli.compose(overrides).model._target_


def test_many_commands_are_found():
    assert len(COMPOSED) > 50
    assert ("strategy=fsdp", "trainer.devices=8") in COMPOSED


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_runs_a_script_of_ours_with_options_that_it_has(name):
    hydra = ("-m", "--multirun", "--cfg", "--help", "--package", "--resolve", "-sc")
    for command in commands(TEXTS[name]):
        script, after = after_script(command)
        if script is None or not is_ours(str(script.relative_to(ROOT))):
            continue
        code = script.read_text() + Path(cli.__file__).read_text()
        for option in (word.partition("=")[0] for word in after if word.startswith("-")):
            assert option in hydra or f'"{option}"' in code, (
                f"{command}: {script.name} has no {option}"
            )


def is_ours(path: str) -> bool:
    return not (ELSEWHERE.fullmatch(path) or MADE.fullmatch(path) or path == "ddp.py")


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name):
    page = ROOT / name
    text = re.sub(r"`[^`]+`", "`code`", prose(TEXTS[name]))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{name}: {target}"
        inside = page.parent != DOCS or DOCS in linked.parents
        assert inside, (
            f"{name}: {target} is not in docs/, so the site lacks it: write it as code, without a "
            "link"
        )


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_that_is_named_exists(name):
    for path in set(re.findall(rf"(?<![\w/.=~])(?:{FOLDERS})/[\w./*-]*[\w*/]", TEXTS[name])):
        assert not is_ours(path) or list(ROOT.glob(path.rstrip("/"))), path


def test_every_page_that_code_and_configurations_name_exists():
    folders = ("src", "configs", "scripts", "tests", ".github", "benchmarks", "notebooks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = {
        (page, str(path.relative_to(ROOT)))
        for path in [*files, ROOT / "Makefile"]
        if path.is_file() and path.suffix in ("", ".py", ".sh", ".yml", ".yaml")
        for page in re.findall(r"(?<![\w/])docs/[\w-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert [each for each in named if not (ROOT / each[0]).exists() and each[0] != REFERENCE] == []


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, text in TEXTS.items():
        blocks = "\n".join(body for _, _, body in FENCE.findall(text))
        named = {
            each
            for span in [*spans(text), *blocks.splitlines()]
            for each in re.findall(r"^make ([a-z-]+)", span)
        }
        assert named <= targets, name


@pytest.mark.parametrize("name", TEXTS)
def test_code_parses_and_excerpts_are_in_the_file_that_they_name(name):
    for _, language, body in FENCE.findall(TEXTS[name]):
        if language == "python":  # a part of a function as a whole one, so that it parses
            ast.parse("def excerpt():\n" + re.sub("^", "    ", body, flags=re.MULTILINE))
        elif language == "yaml":
            yaml.safe_load(body)
        head, _, rest = body.partition("\n")
        file = ROOT / head.removeprefix("# ")
        if language in ("python", "yaml") and head.startswith("# ") and file.is_file():
            lines = [line.strip() for line in file.read_text().splitlines()]
            assert "\n".join(line.strip() for line in rest.splitlines()) in "\n".join(lines), (
                f"{name}: {head}"
            )


@pytest.mark.parametrize("name", TEXTS)
def test_lists_and_tables_begin_after_an_empty_line(name):
    """Else the site shows them as a part of the paragraph above."""
    lines = prose(TEXTS[name]).splitlines()
    for above, line in itertools.pairwise(lines):
        begins = line.startswith(("- ", "| ", "1. ")) and not above.startswith(
            (line[0], " ", "#", "<!--")
        )
        assert not begins or not above.strip(), f"{name}: {line}"


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = [page for entry in site["nav"] for page in entry.values()]
    pages = {"reference.md", *(path.name for path in DOCS.glob("*.md"))}
    assert sorted(named) == sorted(pages), "mkdocs.yml names each page once"


def test_the_configuration_reference_shows_every_file():
    page = reference.page(reference.files())
    for path in reference.files():
        assert "\n".join(reference.section(path)).strip() in page


def test_comments_and_values_of_a_file_become_a_table(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "# @package _global_\n# python train.py debug=fast\n# What it is for.\na:\n  # Above b,\n  "
        "# in two lines\n"
        "  b: [1, 2] # beside | b\n  # Title\n  c: 'x # y'\n"
    )
    text = "\n".join(reference.describe(file))
    assert text.startswith("`python train.py debug=fast`<br>\nWhat it is for.\n")
    assert "| `a.b` | `[1, 2]` | Above b, in two lines beside \\| b |" in text
    assert "| `a.c` | `'x # y'` |  |" in text
