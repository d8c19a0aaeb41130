"""docs/contract.md names for each sentence the tests that hold it."""

import ast
import re

import pytest

from tests import running

PAGE = (running.ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))
SENTENCES = 6
MOST_WORDS = 900


def held(node: ast.stmt) -> bool:
    """Whether a test, or the `pytestmark` of a file, has the mark, if only for some parameters."""
    if isinstance(node, ast.FunctionDef):
        return any("guarantee" in ast.unparse(each).lower() for each in node.decorator_list)
    return (
        isinstance(node, ast.Assign)
        and ast.unparse(node).startswith("pytestmark")
        and ("guarantee" in ast.unparse(node))
    )


@pytest.mark.guarantee
@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_the_page_names_exists_and_is_marked(test):
    file, _, name = test.partition("::")
    body = ast.parse((running.ROOT / file).read_text(encoding="utf-8")).body
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(tests) == 1
    assert held(tests[0]) or any(held(node) for node in body if isinstance(node, ast.Assign))


@pytest.mark.guarantee
def test_each_sentence_names_a_test_that_holds_it():
    sentences = re.split(r"^## \d\. ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sentences) == SENTENCES
    for sentence in sentences:
        own = sentence.partition("\n## ")[0]
        assert re.search(r"`tests/[\w/]+\.py::\w+`", own), own.splitlines()[0]


def test_the_page_stays_a_page():
    assert len(PAGE.split()) <= MOST_WORDS
