"""The pages of docs/ and the other documents: their links, commands, paths, excerpts and quoted
messages are true.
"""

import ast
import functools
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from armature import cli
from scripts import reference
from tests import running

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "reference.md"  # by `make docs`
PAGES = [
    *sorted(page for page in DOCS.glob("*.md") if page != GENERATED),
    *(
        ROOT / name
        for name in (
            "README.md",
            "AGENTS.md",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "scripts/multinode/README.md",
        )
    ),
]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
TAKE_OVERRIDES = (
    *(
        "train.py",
        "train.sbatch",
        "run.sh",
        "plan.py",
        "simulate.py",
        "doctor.py",
        "show_batch.py",
    ),
    "prove.py",
)
OWN_KEYS = ("hardware=", "out=")  # of a script, not of the configuration
CREATED = (  # by users, and by runs
    "src/mine", "src/moons", "src/points", "tests/test_moons.py", "configs/local/default.yaml",
)  # fmt: skip
MADE = re.compile(r"configs/(?:\*|\w+)/(?:mine|moons|points|aim)\.yaml")


def prose(text: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^    \S.*$", "", FENCE.sub("", text), flags=re.MULTILINE)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", prose(text))


@functools.cache
def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]+)]\([^)]*\)", r"\1", title)) for title in titles
    ]
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


def words_of(command: str) -> list[str]:
    return [
        word for word in shlex.split(command, comments=True) if "…" not in word and "<" not in word
    ]


def script_of(words: list[str]) -> Path | None:
    """The script of ours that a command runs."""
    return next(
        (
            ROOT / word
            for word in words
            if word.endswith((".py", ".sh", ".sbatch")) and "=" not in word
        ),
        None,
    )


def overrides_of(command: str) -> tuple[str, ...] | None:
    """What a command changes in the configuration of train.py, of a sweep its first trial.

    None: it trains nothing.
    """
    words = words_of(command)
    script = script_of(words)
    if script is None or script.name not in TAKE_OVERRIDES or not script.exists():
        return None
    after = words[words.index(next(word for word in words if word.endswith(script.name))) + 1 :]
    found = []
    for word in after:
        key, is_override, value = word.partition("=")
        if not is_override or key.isupper() or word.startswith(("-", *OWN_KEYS)):
            continue
        if "-m" in words:
            value = re.sub(r"^(?:choice|range)\((.*)\)$", r"\1", value).split(",")[0]
        found.append(f"{key}={value}")
    return tuple(found)


COMPOSED = sorted(  # those of README.md: tests/test_readme.py
    {
        found
        for name in TEXTS
        if name != "README.md"
        for each in commands(TEXTS[name])
        if (found := overrides_of(each))
    }
)


@pytest.mark.parametrize("overrides", COMPOSED, ids=" ".join)
def test_every_command_composes(overrides):
    """A user's own experiment stands for the example that it is copied from."""
    typed = [
        re.sub(r"^experiment=(mine|moons|points)$", "experiment=example", word)
        for word in overrides
    ]
    assert cli.compose(typed).model._target_


def test_every_row_of_the_table_that_chooses_a_strategy_composes():
    table = TEXTS["docs/strategies.md"].partition("## All strategies")[0]
    rows = re.findall(r"`(strategy=[^`]+)`", table.partition("| your case |")[2])
    assert len(rows) > 8
    for row in rows:
        assert cli.compose(row.split()).strategy._target_, row


def test_many_commands_are_found():
    assert len(COMPOSED) > 50
    assert overrides_of("python train.py -m seed=range(3,5) 'a=choice(x,y)' run.name=…") == (
        "seed=3",
        "a=x",
    )
    assert overrides_of("python scripts/evaluate.py outputs/mine data.path=x") is None


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_runs_a_script_of_ours_with_options_that_it_has(name):
    for command in commands(TEXTS[name]):
        words = words_of(command)
        script = script_of(words)
        if script is None or is_elsewhere(str(script.relative_to(ROOT)), name):
            continue
        assert script.exists(), command
        code = script.read_text() + Path(cli.__file__).read_text()
        after = words[next(i for i, word in enumerate(words) if word.endswith(script.name)) + 1 :]
        hydra = ("-m", "--multirun", "--cfg", "--help", "--package", "--resolve", "-sc")
        for option in (word.partition("=")[0] for word in after if word.startswith("-")):
            assert option in hydra or f'"{option}"' in code, (
                f"{command}: {script.name} has no {option}"
            )


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a clone")
def test_git_ignores_the_files_that_the_commands_write():
    words = {
        word for text in TEXTS.values() for command in commands(text) for word in words_of(command)
    }
    files = {
        word.removeprefix("out=") for word in words if word.startswith("out=") and "/" not in word
    }
    files |= {
        word for word in words if re.fullmatch(r"[\w.-]+\.(?:pt2|onnx|ckpt|safetensors)", word)
    }
    files.add("compare.html")  # of scripts/runs.py compare without out=
    assert len(files) > 4
    result = subprocess.run(
        ["git", "check-ignore", *files], cwd=ROOT, capture_output=True, text=True
    )
    assert set(result.stdout.split()) == files


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
    folders = "src|configs|scripts|docs|benchmarks|kubernetes|tests"
    text = re.sub(r"<!--.*?-->", "", TEXTS[name], flags=re.DOTALL)
    named = re.findall(rf"(?<![\w/.=~])(?:{folders})/[\w./*-]*[\w*/]", text)
    for path in set(named):
        made = path.startswith(CREATED) or MADE.fullmatch(path)
        assert made or list(ROOT.glob(path.rstrip("/"))) or is_elsewhere(path, name), path


def is_elsewhere(path: str, name: str) -> bool:
    """Paths of other projects, in the pages that compare with them."""
    return (
        name == "docs/migrating.md"
        and path.startswith(
            (
                "src/models",
                "src/data",
                "src/mypackage",
                "src/train.py",
                "src/eval.py",
                "configs/",
                "ddp.py",
            )
        )
    ) or path.endswith("torchtitan.md")


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
        if language == "python":
            ast.parse(excerpt(body))
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


def excerpt(body: str) -> str:
    """A part of a function as a whole one, so that it parses."""
    return "def excerpt():\n" + "\n".join(f"    {line}" for line in body.splitlines())


def test_the_site_has_every_page():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(node) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [
            leaf
            for each in (node.values() if isinstance(node, dict) else node)
            for leaf in leaves(each)
        ]

    named = leaves(site["nav"])
    pages = {GENERATED.name, *(path.name for path in DOCS.glob("*.md"))}
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


def test_every_message_that_the_page_about_errors_quotes_is_in_the_code():
    text = TEXTS["docs/faq.md"].partition("## Exit codes")[0]
    rows = re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE)
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 40
    code = "\n".join(
        texts_of(ast.parse(path.read_text())) for path in (ROOT / "src" / "armature").rglob("*.py")
    )
    assert [message for message in quoted if message not in code] == []


def shown(part: ast.expr) -> str:
    return (
        "{" + ast.unparse(part.value) + "}"
        if isinstance(part, ast.FormattedValue)
        else ast.literal_eval(part)
    )


def texts_of(tree: ast.AST) -> str:
    """The texts in a file, those of f-strings with their placeholders."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(shown(part) for part in node.values))
    return "\n".join(found)


@pytest.mark.slow
def test_the_program_that_the_page_about_migrating_moves_over_trains(tmp_path):
    ignored = shutil.ignore_patterns(
        "__pycache__", "*.egg-info", "points", "points.yaml"
    )  # a user's own
    for name in ("configs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "train.py", tmp_path)
    files = [
        body.partition("\n")
        for _, language, body in FENCE.findall(TEXTS["docs/migrating.md"])
        if language
    ]
    written = {head.removeprefix("# "): rest for head, _, rest in files if "points" in head}
    assert len(written) == 5
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    fixed = ["logger=none", "trainer.accelerator=cpu", "trainer.precision=32-true"]
    command = [sys.executable, "train.py", "experiment=points", *fixed]
    env = {**running.environment(), "PYTHONPATH": ""}
    for words in (["trainer.max_epochs=2", "run.name=run"], ["debug=overfit", "run.name=overfit"]):
        result = subprocess.run(
            [*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
    assert running.summary(tmp_path / "outputs" / "run")["metrics"]["val/accuracy"] > 0.9
    losses = running.losses(tmp_path / "outputs" / "overfit")
    assert losses[-1] < 0.1 * losses[0]  # one batch over and over
    words = ["strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1", "run.name=ddp"]
    result = subprocess.run(
        [*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    epoch = running.losses(tmp_path / "outputs" / "run")[:64]
    assert running.losses(tmp_path / "outputs" / "ddp") == pytest.approx(epoch, rel=1e-4)


@pytest.mark.slow
def test_the_script_that_the_page_about_migrating_starts_from_runs(tmp_path):
    (script,) = [
        body
        for _, _, body in FENCE.findall(TEXTS["docs/migrating.md"])
        if body.startswith("# ddp.py\n")
    ]
    (tmp_path / "ddp.py").write_text(script)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "ddp.py",
    ]
    env = {**running.environment(), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in lines] == [*"01234"]
    assert float(lines[-1].split()[-1]) > 0.9
    assert (tmp_path / "last.pt").exists()
