"""What is shown of an error: the lines of the user's code, without those of libraries and of this
project.
"""

import re
import sys
import textwrap
import traceback

import pytest
import torch
from torch.utils.data import DataLoader

from armature import errors


def failed(call):
    try:
        call()
    except Exception:
        return errors.brief(traceback.format_exc())
    raise AssertionError("it did not fail")


def step(weight):
    return weight @ torch.ones(3)


def test_the_users_lines_and_the_error_remain():
    text = failed(lambda: step(torch.ones(2, 2)))
    head, *_, place, line, message, _ = text.splitlines()
    assert head.startswith("Traceback (most recent call last)")
    assert place.startswith(f'  File "{__file__}", line ')
    assert line == "    return weight @ torch.ones(3)"
    assert message.startswith("RuntimeError: size mismatch")
    assert "site-packages" not in text


class Broken:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise FileNotFoundError(f"no image {index}")


def test_an_error_of_a_data_worker_is_shown_as_its_own():
    text = failed(lambda: next(iter(DataLoader(Broken(), num_workers=1))))
    assert text.count("Traceback") == 1
    assert text.splitlines()[-3].strip() == 'raise FileNotFoundError(f"no image {index}")'
    assert text.splitlines()[-2] == "FileNotFoundError: no image 0"


def test_a_cause_is_shown_with_its_message():
    def fails():
        try:
            {}["weights"]
        except KeyError as error:
            raise RuntimeError("could not load") from error

    text = failed(fails)
    places = [i for i, line in enumerate(text.splitlines()) if line.startswith('  File "')]
    assert text.count("Traceback") == 1
    assert places[0] < text.splitlines().index("KeyError: 'weights'") < places[-1]
    assert "direct cause" in text
    assert "RuntimeError: could not load" in text


@pytest.mark.slow
def test_the_whole_traceback_is_pointed_to():
    def fails(note=None):
        error = ValueError("wrong")
        if note:
            error.add_note(note)
        raise error

    assert failed(fails).endswith(
        "ValueError: wrong\nHYDRA_FULL_ERROR=1 shows the whole traceback."
    )
    assert failed(lambda: fails(f"{errors.LOG_NOTE} a.log.")).endswith(
        f"wrong\n{errors.LOG_NOTE} a.log."
    )


def test_the_place_of_an_error_is_the_users(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "missing").read_text()
    assert errors.place_of(caught.value).startswith(f"{__file__}:")
    assert errors.by_user(caught.value)


def test_an_error_without_a_line_of_the_users_is_its_message():
    text = textwrap.dedent("""\
        Traceback (most recent call last):
          File "/usr/lib/python3/site-packages/torch/nn/module.py", line 3, in forward
            x = y
        NameError: name 'y' is not defined
        """)
    assert errors.brief(text, points=False) == "NameError: name 'y' is not defined"


def lightning_that(interrupts):
    try:
        interrupts()
    except KeyboardInterrupt:
        sys.exit(1)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: sys.exit(0), r"SystemExit\(0\)"),
        (lambda: sys.exit("enough"), r"SystemExit\('enough'\)"),
        (lambda: lightning_that(interrupt), r"KeyboardInterrupt\(\)"),
    ],
)
def test_code_that_ends_the_process_is_named_and_fails_the_run(call, cause):
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        call()
    ended = errors.EndedByCode.by(caught.value)
    assert ended.exit_code == 1
    assert re.search(
        rf"{cause} was raised at {__file__}:\d+\. .* trainer\.should_stop = True", str(ended)
    )
