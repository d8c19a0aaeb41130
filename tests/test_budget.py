"""The project stays as small as scripts/size.py says."""

import pytest

from scripts import size

CODE = '''"""A docstring."""
import os  # a comment


class A:
    """Another."""

    x: int = 1

    def f(self):
        "A third."
        text = ("no docstring"
                f"{os.sep}{self.x:>{3}}")
        "a statement"
        return text
'''


@pytest.fixture(scope="module")
def sizes():
    return size.measure()


@pytest.mark.parametrize("part", size.LIMITS)
def test_a_part_is_within_its_limit(part, sizes):
    assert size.problems({part: sizes[part]}) == []


@pytest.mark.parametrize("part", size.LIMITS)
def test_a_limit_only_falls_towards_its_goal(part):
    assert size.LIMITS[part].today >= size.LIMITS[part].goal


def test_every_optional_part_is_a_folder():
    library = size.ROOT / "src" / "armature"
    assert [name for name in size.OPTIONAL if not (library / name).is_dir()] == []


def test_tokens_count_neither_layout_nor_docstrings():
    counted = "import os class A : x : int = 1 def f ( self ) :"
    counted += " text = ( 'no_docstring' f'…' ) 'a_statement' return text"
    assert size.tokens(CODE) == len(counted.split())
    assert size.tokens(CODE.replace('("no docstring"\n', '("no docstring" ')) == size.tokens(CODE)
