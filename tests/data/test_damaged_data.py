"""Files of data that are damaged, odd or no files: each is refused with its line or row and what to
do.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from armature.data import sources
from armature.errors import ConfigError
from tests.data.feeding import build

CSV = "a,b,kind\n1,2,x\n3,4,y\n"
TABLES = {
    "semicolons": (CSV.replace(",", ";"), r"has no column kind. Its columns: a;b;kind"),
    "short row": (f"{CSV}\n5,6\n", r"Row #4: Expected 3 columns, got 2: 5,6"),
    "open quote": (f'{CSV}5,6,"x\n7,8,y\n', r"in row 4 a quote is opened and never closed"),
    "empty": ("", r"t.csv cannot be read as CSV in UTF-8 \(.*Empty CSV file"),
    "no names": ("0,0,x\n1,2,y\n", r"two columns are named 0. .* the first line"),
    "names with spaces": (
        CSV.replace(",", ", "),
        r"has no column kind. Its columns: a, ' b', ' kind'",
    ),
    "empty cell": (f"{CSV}5,,x\n", r"column b is empty in data row 3, .* Fill it in"),
    "text": (f"{CSV}5,many,x\n", r"column b has the type string, .*'many'"),
    "too large": (f"{CSV}5,1e300,x\n", r"column b holds 1e\+300 in data row 3"),
}


@pytest.mark.guarantee
@pytest.mark.parametrize(("text", "message"), TABLES.values(), ids=TABLES)
def test_a_damaged_csv_file_is_named_with_its_row(text, message, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        build("table", path=str(tmp_path / "t.csv"), target="kind").names()


NO_FILES = {
    "folder": (Path.mkdir, r"the folder holds no files. Put some there"),
    "pipe": (os.mkfifo, r"is a link to what is not there, a device or a pipe. Name a file"),
}


@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES)
def test_what_is_there_and_no_file_is_told_as_what_it_is(make, message, tmp_path):
    make(tmp_path / "x.csv")
    with pytest.raises(ConfigError, match=message) as raised:
        sources.find(str(tmp_path / "x.csv"))
    assert "Did you mean" not in str(raised.value)


IDS = np.arange(1, 1000, dtype="<u2")
TOKENS = {
    "an odd byte": (IDS.tobytes() + b"0", r"no .bin file of a whole number of uint16 tokens"),
    "none": (b"", r"whole number of uint16 tokens \(0 bytes\)"),
    "few": (
        IDS[:5].tobytes(),
        r"data.context=8 is longer than the 5 tokens of .* Type data.context=4 or less",
    ),
}


@pytest.mark.parametrize(("content", "message"), TOKENS.values(), ids=TOKENS)
def test_a_damaged_file_of_tokens_says_what_it_holds(content, message, tmp_path):
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build(
            "tokens",
            path=str(tmp_path / "t.bin"),
            context=8,
            source__val_fraction=0,
            source__test_fraction=0,
        )


def images(path: Path, *, kinds: tuple[str, ...] = ("cat", "dog")) -> Path:
    for kind in kinds:
        (path / kind).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(path / kind / "1.png")
    return path


@pytest.mark.guarantee
def test_a_damaged_image_is_named_also_by_a_loader_process(tmp_path):
    folder = images(tmp_path / "images")
    for kind in ("cat", "dog"):
        (folder / kind / "1.png").write_bytes(b"")
    data = build("image_folder", path=str(folder), num_workers=1, global_batch_size=2)
    with pytest.raises(
        ConfigError, match=r"^data.path: .*1.png cannot be read as an image .* Remove it.$"
    ) as raised:
        next(iter(data.train_dataloader()))
    assert len(raised.value.problems) == 1


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # datasets leaves the image open
def test_damaged_files_of_hugging_face_datasets_are_named(tmp_path, hf):
    (tmp_path / "t.csv").touch()
    with pytest.raises(
        ConfigError,
        match=r"data.path=csv \(.*t.csv\), split train: EmptyDataError: .*file. Type data.splits",
    ):
        hf(path="csv", data_files=str(tmp_path / "t.csv")).dataset("train")
    with pytest.raises(
        ConfigError, match=r"data.path=csv: a format, but no files. Type data.data_files="
    ):
        hf(path="csv").dataset("train")
    folder = images(tmp_path / "images")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), np.uint8)).save(
        folder / "dog" / "1.png"
    )
    (folder / "dog" / "1.png").write_bytes((folder / "dog" / "1.png").read_bytes()[:2000])
    path = {"path": "imagefolder", "data_dir": str(folder)}
    data = hf(**path, inputs="image", targets="label")
    with pytest.raises(
        ConfigError, match=r"data.path=imagefolder \(.*\), split train: sample 1 cannot be read"
    ):
        data.dataset("train")[1]
