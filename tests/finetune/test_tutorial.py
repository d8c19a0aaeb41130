"""The tutorial's conversations about the standard library."""

import json

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


def test_files_that_are_held_out_are_left_out_and_few_conversations_are_the_same_each_time(
    tmp_path, monkeypatch
):
    script = in_process.load("stdlib_chats")
    file = tmp_path / "code.py"
    file.write_text(CODE)
    monkeypatch.setattr(script, "training_files", lambda: [file])
    lines = []
    for target in (tmp_path / "a.jsonl", tmp_path / "b.jsonl"):
        said = in_process.call(script, target, "--most", "4")
        assert said == (0, f"{target}: 4 conversations of 6\n")
        lines.append(target.read_text())
    assert lines[0] == lines[1]
    assert [sorted(json.loads(line)) for line in lines[0].splitlines()] == [
        ["completion", "prompt"]
    ] * 4
