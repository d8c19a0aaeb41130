"""scripts/plot.py, compare.py and report.py: what they write, and what they say of mistakes."""

import sys

import pytest

from scripts import compare, plot, report
from tests.pages.run_files import write


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(("a", "b")):
        write(tmp_path / name, name=name, offset=i / 9)

    def run(script, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [script.__name__, *words])
        try:
            script.main()
            code = 0
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_curves_of_runs_go_to_the_file_that_was_named(run, tmp_path):
    assert run(plot, "a", "b", "out=loss.svg", "--log")[0] == 0
    text = (tmp_path / "loss.svg").read_text()
    assert ">a<" in text
    assert ">b<" in text
    assert "log scale" in text


def test_a_file_for_each_theme_and_one_beside_the_run_by_default(run, tmp_path):
    assert run(plot, "a", "--out", "x.svg", "--theme", "both")[1].split() == [
        "x-light.svg",
        "x-dark.svg",
    ]
    assert run(plot, "a", "--metric", "val/loss", "--x", "tokens")[1].split() == ["a/val-loss.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["a", "--metric", "val/los"],
            "--metric val/los: a has no such values. It has epoch, samples",
        ),
        (["a", "--x", "hours"], "--x hours: a has no such values"),
        (["a", "--metric", "data_wait", "--x", "tokens"], "Type --x step"),
        (["none"], "none: not a run directory. Type outputs/<run.name>"),
        (["a", "out=x.png"], "out=x.png: name a file that ends in .svg"),
        (["a", "--metric", ""], "--metric : a has no such values"),
        (["a", "--log", "out=/proc/x.svg"], "out=/proc/x.svg: it cannot be written"),
        (["a", f"out={'x' * 300}.svg"], "it cannot be written (File name too long)"),
        (["x" * 300], "not a run directory"),
        (["a", "--smooth", "4"], "--smooth 4: the mean is centered. Type --smooth 5"),
        (["a", "--smooth", "0"], "--smooth 0: type a number of values of at least 1"),
    ],
)
def test_a_mistake_of_plot_is_named(run, words, message):
    code, said = run(plot, *words)
    assert code == 2
    assert message in said


def test_a_logarithmic_axis_needs_a_value_above_0(run, tmp_path):
    (tmp_path / "b" / "metrics.csv").write_text("step,train/loss\n1,-3.0\n2,-4.0\n")
    code, said = run(plot, "a", "b", "--log", "out=x.svg")
    assert (code, "--log: b has no train/loss above 0. Leave it out." in said) == (2, True)


def test_a_file_may_be_named_behind_an_option(run):
    assert run(plot, "a", "--metric", "val/loss", "out=x.svg")[1].split() == ["x.svg"]


def test_a_config_that_holds_a_number_only_empties_its_part_of_a_page(run, tmp_path):
    (tmp_path / "b" / "config.yaml").write_text("5")
    assert run(compare, "a", "b", "out=both.html")[0] == 0


def test_compare_prints_a_table_and_writes_a_page(run, tmp_path):
    code, said = run(compare, "a", "b", "out=both.html")
    assert code == 0
    assert "val/loss" in said
    assert "both.html" in said
    assert "<h1>2 runs</h1>" in (tmp_path / "both.html").read_text()


def test_compare_takes_all_files_beside_the_trials_of_a_sweep(run, tmp_path):
    (tmp_path / "trials.csv").write_text("trial\n")
    code, said = run(compare, "a", "b", "trials.csv", "out=both.html")
    assert (code, "2 runs" in (tmp_path / "both.html").read_text()) == (0, True), said


def test_all_mistakes_of_compare_are_named_together(run):
    assert "x.html: it cannot be written" in run(compare, "a", "b", "out=/proc/x.html")[1]
    code, said = run(compare, "none", "out=x.txt")
    assert code == 2
    for message in (
        "none: not a run directory",
        "1 run: name at least two",
        "out=x.txt: name a file that ends in .html",
    ):
        assert message in said


def test_the_report_of_a_run_is_written_again(run, tmp_path):
    assert run(report, "a", "b")[0] == 0
    assert "<h1>b</h1>" in (tmp_path / "b" / "report.html").read_text()
    assert run(report, "nowhere")[0] == 2
