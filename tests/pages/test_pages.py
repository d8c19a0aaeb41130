"""report.html and compare.html: what they show, and that nothing of a run becomes markup or a
request.
"""

import json
import re
from html.parser import HTMLParser

import pytest

from armature.pages import compare, history, report
from tests.pages.run_files import HOSTILE, write

ALLOWED = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "main",
    "h1",
    "h2",
    "p",
    "span",
    "div",
    "b",
    "svg",
    "text",
    "line",
    "polyline",
    "circle",
    "input",
    "label",
    "table",
    "tr",
    "th",
    "td",
    "code",
    "pre",
    "details",
    "summary",
    "figure",
    "img",
}


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def assert_harmless(page: str) -> None:
    """Only elements of ours, no script, no address but that of an image in the page, no handler."""
    for tag, attributes in Elements(page).found:
        assert tag in ALLOWED, tag
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert attributes.get(name, "data:image/png;base64,").startswith(
                "data:image/png;base64,"
            )
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def bold(page: str) -> list[str]:
    return [re.sub("</?code>", "", text) for text in re.findall(r"<b>(.*?)</b>", page)]


def test_the_page_of_a_run_has_all_parts(tmp_path):
    page = report.make(write(tmp_path / "mine"))
    for part in (
        "Learning",
        "Learning rate and speed",
        "Memory",
        "Samples over time",
        "Starts",
        "Configuration",
    ):
        assert f"<h2>{part}</h2>" in page
    for title in (
        "loss",
        "val/accuracy",
        "train/grad_norm",
        "lr",
        "tokens per second",
        "memory of the fullest rank, GiB",
    ):
        assert f'aria-label="{title}"' in page, title
    for text in (
        "120 of 120",
        "33,826",
        "dashed: restarts",
        "abc123",
        "2.13.0",
        "7, not 1",
        "def f(): 60",
    ):
        assert text in page, text
    assert "lost" not in page  # samples of steps that the second start has not made
    assert page.count("data:image/png") == 2
    assert_harmless(page)


def test_keys_that_were_typed_are_bold(tmp_path):
    page = report.make(write(tmp_path / "mine", config="resume: auto\n"))
    assert {"optimizer.lr", "0.5"} <= set(bold(page))
    assert not {"seed", "resume", "run.report", "checkpoint.monitor"} & set(bold(page))


def test_hostile_names_and_samples_stay_text(tmp_path):
    config = f"data: {{path: {json.dumps(HOSTILE)}}}\ntask: {{_target_: {json.dumps(HOSTILE)}}}\n"
    path = write(tmp_path / "x", name=HOSTILE, config=config, text=HOSTILE, classes=(HOSTILE, "1"))
    table = (path / "metrics.csv").read_text()
    (path / "metrics.csv").write_text(
        table.replace("train/grad_norm", "train/<script>alert(3)</script>")
    )
    other = write(tmp_path / "y", offset=0.5)
    for page in (report.make(path), compare.make([history.read(path), history.read(other)])):
        assert_harmless(page)
        assert HOSTILE in " ".join(Elements(page).texts)


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.csv", "timings.csv", "report.jsonl", "summary.json"]
)
@pytest.mark.parametrize("damage", ["none", "bytes", "other"])
def test_a_damaged_file_costs_its_part_of_the_page_only(tmp_path, name, damage):
    path = write(tmp_path / "mine")
    if damage == "none":
        (path / name).unlink()
    else:
        other = (
            b'{"event": "images", "step": 1, "images": [1, {"pixels": "?"}]}\n[[[\nstep\n1\n-1\n"'
        )
        (path / name).write_bytes({"bytes": b"\xff\x00{: [", "other": other}[damage])
    page = report.make(path)
    assert_harmless(page)
    assert "<h1>mine</h1>" in page
    if name != "metrics.csv":
        assert 'aria-label="loss"' in page


def test_what_is_no_number_spoils_no_other_number(tmp_path):
    path = write(tmp_path / "mine")
    (path / "metrics.csv").write_text("step,val/loss\n1,0.5\n2,nan\n")
    (path / "config.yaml").write_text(
        "run: {name: mine}\ncheckpoint: {monitor: val/loss, mode: min}\n"
    )
    (path / "summary.json").write_text('{"global_step": "x", "tokens_per_second": "fast"}')
    page = report.make(path)
    assert "best val/loss" in page
    assert ">nan<" not in page


def test_the_best_of_each_metric_is_bold_and_differences_are_listed(tmp_path):
    runs = [
        history.read(write(tmp_path / name, name=name, offset=i / 4))
        for i, name in enumerate(("a", "b"))
    ]
    changed = write(tmp_path / "c", name="c", config="trainer: {precision: 32-true}\n", steps=60)
    runs.append(history.read(changed))
    page = compare.make(runs)
    assert_harmless(page)
    results = compare.results(runs)
    assert compare.best("val/loss", results["val/loss"], runs) == {0}
    assert compare.best("val/accuracy", [0.5, 0.9, 0.9], runs) == {1, 2}
    assert compare.best("optimizer steps", [1.0, 2.0, 3.0], runs) == set()
    assert compare.best("train/loss", [1.0, None, float("nan")], runs) == set()
    assert compare.differences(runs) == {
        "trainer.precision": [compare.MISSING, compare.MISSING, "32-true"]
    }
    text = compare.text(runs)
    assert re.search(r"^val/loss +[\d.]+\* ", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "aim"),
    [
        ("val/error2", "min"),
        ("val/f1", "max"),
        ("tokens per second", "max"),
        ("val/score", None),
    ],
)
def test_what_is_better_follows_from_the_words_of_a_name(name, aim):
    assert compare.goal(name, []) == aim


def test_values_under_a_modules_own_names_are_shown(tmp_path):
    """`val_loss` is what Lightning's own documentation logs."""
    path = write(tmp_path / "mine", config="")
    for file, old, new in (
        ("metrics.csv", "val/loss,val/accuracy", "val_loss,score"),
        ("config.yaml", "val/", "val_"),
    ):
        (path / file).write_text((path / file).read_text().replace(old, new))
    runs = [history.read(path), history.read(write(tmp_path / "other", name="other"))]
    page = report.make(path)
    assert 'aria-label="score"' in page
    assert "val_loss</p>" in page  # with the training loss, in one chart
    assert 'aria-label="val_loss"' in compare.make(runs)
    assert compare.results(runs)["val_loss"] == [min(runs[0].curve("val_loss")[1]), None]
