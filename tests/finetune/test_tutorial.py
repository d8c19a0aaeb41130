"""The tutorial's conversations about the standard library."""

import json

import pytest

from tests import in_process

CODE = '''
@cache
def area(width, height=1):
    """Return the area
    of a rectangle. In metres."""
    return width * height

def bare(x):
    return x

class Shape:
    def clear(*parts):
        """Clear."""
'''


def test_conversations_ask_for_name_arguments_and_purpose_without_showing_the_docstring():
    found = [*in_process.load("stdlib_chats").conversations(CODE)]
    answers = [chat["completion"] for chat in found]
    assert answers == [
        "It is called `area`.", "It takes `width`, `height`.", "Return the area of a rectangle.",
        "It is called `clear`.", "It takes no arguments.", "Clear.",
    ]  # fmt: skip
    assert found[1]["prompt"] == (
        "Which arguments does it take?\n\ndef area(width, height=1):\n    return width * height"
    )
    assert found[3]["prompt"].endswith("def clear(*parts):\n    pass")
    assert not [*in_process.load("stdlib_chats").conversations("def (")]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ("none/a.jsonl",),
            "none/a.jsonl: name a file that ends in .jsonl, in a folder that exists",
        ),
        (("a.txt",), "a.txt: name a file that ends in .jsonl"),
        (("a.jsonl", "--most", "-1"), "--most -1: must be at least 1"),
    ],
)
def test_a_file_of_conversations_that_cannot_be_is_refused_before_the_work(
    typed, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert message in in_process.run(in_process.load("stdlib_chats"), typed, monkeypatch, capsys)


def test_files_that_are_held_out_are_left_out_and_few_conversations_are_the_same_each_time(
    tmp_path, monkeypatch, capsys
):
    script = in_process.load("stdlib_chats")
    file = tmp_path / "code.py"
    file.write_text(CODE)
    monkeypatch.setattr(script, "training_files", lambda: [file])
    lines = []
    for target in (tmp_path / "a.jsonl", tmp_path / "b.jsonl"):
        said = in_process.run(script, (str(target), "--most", "4"), monkeypatch, capsys)
        assert said == f"{target}: 4 conversations of 6\n"
        lines.append(target.read_text())
    assert lines[0] == lines[1]
    assert [sorted(json.loads(line)) for line in lines[0].splitlines()] == [
        ["completion", "prompt"]
    ] * 4
