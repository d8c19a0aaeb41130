"""Data modules for data that people have: built from their config files, on small files."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from armature.errors import ConfigError
from tests.data.feeding import build
from tests.running import call


def write_table(file, rows=40):
    lines = [
        "width,height,kind",
        *(f"{i},{i / 2},{'odd' if i % 2 else 'even'}" for i in range(rows)),
    ]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_a_table_of_csv(tmp_path):
    path = write_table(tmp_path / "t.csv")
    data = build("table", path=path, target="kind", global_batch_size=32)
    batch = next(iter(data.train_dataloader()))
    assert batch["inputs"].shape == (32, 2)
    assert torch.equal(batch["targets"], (batch["inputs"][:, 0] % 2).long())
    sizes = [len(data.dataset(split)) for split in ("train", "val", "test", "predict")]
    assert sizes == [32, 4, 4, 40]
    numbers = build(
        "table", path=path, target="height", features=["width"], classes=False,
        val_fraction=0, test_fraction=1,
    )  # fmt: skip
    sample = numbers.dataset("test")[3]
    assert (sample["inputs"].tolist(), sample["targets"].item()) == ([3.0], 1.5)


@pytest.mark.parametrize("name", ["", "Unnamed: 0", "__index_level_0__"])
def test_row_numbers_of_pandas_are_no_features(tmp_path, caplog, name):
    caplog.set_level("INFO", logger="armature")
    (tmp_path / "t.csv").write_text(f"{name},x,kind\n0,5,a\n1,6,b\n")
    data = build("table", path=str(tmp_path / "t.csv"), target="kind")
    assert data.names()["features"] == ["x"]
    assert "hold row numbers of pandas, and are left out" in caplog.text
    assert build("table", path=data.path, target="kind", features=[name]).names()["features"] == [
        name
    ]
    with pytest.raises(ConfigError, match="these are the columns to learn from"):
        build("table", path=data.path, target="kind", features=[]).names()


def write_images(folder, count=10):
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (30 + i, 20), (100 * number, i, 0)).save(folder / name / f"{i}.png")


@pytest.mark.guarantee
def test_links_are_followed_without_end_and_files_left_out_are_counted(tmp_path, caplog):
    caplog.set_level("INFO", logger="armature")
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    write_images(root, 2)
    write_images(scratch, 3)
    write_images(tmp_path / "third", 1)
    (root / "cat" / "part").symlink_to(scratch / "cat")
    (root / "cat" / "again").symlink_to(scratch / "cat")
    (root / "dog" / "one.png").symlink_to(scratch / "dog" / "0.png")
    (root / "cow").symlink_to(tmp_path / "third" / "cat")
    (scratch / "cat" / "back").symlink_to(root / "cat")
    (scratch / "cat" / "up").symlink_to(root)
    (scratch / "cat" / "scan.HEIC").touch()
    (root / "notes").touch()
    (root / "loose.png").touch()
    changes = {"size": 8, "num_workers": 0, "val_fraction": 0, "test_fraction": 0}
    data = build("image_folder", path=str(root), **changes)
    found = [str(path.relative_to(root)) for path, _ in data.dataset("train").files]
    assert found == [
        *("cat/0.png", "cat/1.png", "cat/again/0.png", "cat/again/1.png", "cat/again/2.png"),
        *("cow/0.png", "dog/0.png", "dog/1.png", "dog/one.png"),
    ]
    assert "train 9, val 0, test 0 images. 3 files are no images in class folders" in caplog.text
    assert "such as" in caplog.text
    (root / "dog" / "lost").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"lost is a link to what is not there"):
        build("image_folder", path=str(root), **changes).dataset("train")


@pytest.mark.guarantee
@pytest.mark.parametrize("train", ["train", "training", "Train_set"])
@pytest.mark.parametrize("val", ["val", "valid", "validation", "dev"])
@pytest.mark.parametrize("test", ["test", "testing"])
def test_usual_names_of_split_folders_are_known(tmp_path, train, val, test):
    for folder, count in ((train, 3), (val, 2), (test, 1)):
        write_images(tmp_path / folder, count)
    data = build("image_folder", path=str(tmp_path), size=8, num_workers=0)
    assert [len(data.dataset(split)) for split in ("train", "val", "test")] == [6, 4, 2]
    assert data.classes == ["cat", "dog"]
    assert len(data.dataset("predict")) == 2
    write_images(tmp_path / ("valid" if val != "valid" else "val"), 1)
    with pytest.raises(ConfigError, match="are names of the val split"):
        build("image_folder", path=str(tmp_path)).dataset("train")


def image_of(tmp_path, image, name="cat/1.png", **options):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    image.save(tmp_path / name, **options)
    data = build(
        "image_folder", path=str(tmp_path), size=8, mean=[0, 0, 0], std=[1, 1, 1], num_workers=0
    )
    return data.dataset("predict")[0]["inputs"]


@pytest.mark.parametrize(
    "pixels", [np.full((8, 8), 30000, np.uint16), np.full((8, 8), 0.5, np.float32)]
)
def test_images_of_more_bits_are_refused(tmp_path, pixels):
    with pytest.raises(ConfigError, match=r"1\.tif has .*Convert the images to 8 bits"):
        image_of(tmp_path, Image.fromarray(pixels), name="cat/1.tif")


def test_images_are_turned_as_the_camera_says(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = 255  # above
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    found = image_of(tmp_path, Image.fromarray(pixels), exif=exif)
    assert found[0].tolist() == [[0] * 4 + [1] * 4] * 8


def test_nanogpts_token_files(tmp_path):
    for split, size in (("train", 400), ("val", 90)):
        (np.arange(size) % 300).astype("<u2").tofile(tmp_path / f"{split}.bin")
    tokens = partial(build, "tokens", path=str(tmp_path), context=8)
    data = tokens()
    batch = next(iter(data.train_dataloader()))
    assert batch["inputs"].shape == (32, 8)
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert list(data.test_dataloader()) == []
    windows = tokens(path=f"{tmp_path}/train.bin", source__val_fraction=0.2).dataset("val")
    pickled = pickle.dumps(windows)  # for a worker that is not forked: the path alone
    assert windows.tokens.tobytes() not in pickled
    assert torch.equal(pickle.loads(pickled)[1]["targets"], windows[1]["targets"])
    np.arange(99).astype("<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(ConfigError, match=r"dtype=uint16: every second token .*dtype=uint32"):
        tokens(path=f"{tmp_path}/wide.bin")
    np.full(90, 300, "<u2").tofile(tmp_path / "val.bin")
    for size, found in ((256, "299"), (300, r"300 \(val split\)")):
        says = rf"data.source.vocab_size={size}, but .* holds the token {found}"
        with pytest.raises(ConfigError, match=says):
            tokens(source__vocab_size=size)


def test_a_blend_takes_each_corpus_by_its_weight(tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    for name, lines in (("a", 3000), ("b", 900)):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"{name} line {i} of text\n" for i in range(lines))
        )
    paths = {name: str(tmp_path / f"{name}.txt") for name in "ab"}
    data = build("blend", paths=paths, weights={"a": 1, "b": 3}, context=16, source__vocab_size=300)
    order = partial(data.order, size=len(data._dataset("train")), seed=3, limited=False)
    first, second = order(0), order(1)
    border = len(data._dataset("train").datasets[0])
    assert np.isclose((first >= border).mean(), 0.75, atol=0.01)
    own = [draw[draw < border] for draw in (first, second)]
    assert len(set(own[0])) == len(own[0])  # no window of a comes twice before all have come
    assert not set(own[0]) & set(own[1]) or len(own[0]) * 2 > border
    assert np.array_equal(order(1), second)
    batch = next(iter(data.train_dataloader()))
    assert batch["inputs"].shape == (32, 16)
    draws = [data.order(epoch, size=8, seed=3, limited=True) for epoch in range(3)]
    assert [sorted(draw) for draw in draws] == [sorted(draws[0])] * 3
    assert not np.array_equal(draws[0], draws[1])
    with pytest.raises(ConfigError, match=r"data.weights names a, and data.paths a, b"):
        build("blend", paths=paths, weights={"a": 1})


def test_hugging_face_datasets(hf, tmp_path):
    changes = {
        "path": "csv",
        "data_files": write_table(tmp_path / "t.csv"),
        "inputs": "width",
        "targets": "height",
        "global_batch_size": 8,
    }
    orders = []
    for streaming in (False, True):
        data = hf(streaming=streaming, **changes)
        orders.append([i for batch in data.train_dataloader() for i in batch["inputs"].tolist()])
    assert sorted(orders[0]) == orders[1] == list(range(40))
    with pytest.raises(ConfigError, match=r"has no column gone. Its columns: width, height, kind"):
        hf(**{**changes, "inputs": "gone"}).dataset("train")
    several = hf(**{**changes, "inputs": ["width", "height"]})
    assert next(iter(several.train_dataloader()))["inputs"].shape == (8, 2)
    dated = f"{tmp_path}/d.jsonl"
    (tmp_path / "d.jsonl").write_text('{"at": "2020-01-01T10:00:00", "x": 1.5, "y": 0}\n')
    assert hf(path="json", data_files=dated, inputs="x").dataset("train")[0]["inputs"] == 1.5
    with pytest.raises(
        ConfigError, match=r"data.inputs=\['width', 'kind'\]: column kind holds no single numbers"
    ):
        hf(**{**changes, "inputs": ["width", "kind"]}).dataset("train")[0]


def test_targets_of_hugging_face_are_classes_and_files_left_out_are_counted(hf, tmp_path, caplog):
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in ("train", "extra"):
        (folder / f"{name}.csv").write_text("x,y\n1.0,True\n2.0,False\n")
    flags = hf(path="csv", data_dir=str(folder), inputs="x")
    assert [int(flags.dataset("train")[i]["targets"]) for i in range(2)] == [1, 0]
    assert "1 of its files are left out, as " in caplog.text
    assert str(folder / "extra.csv") in caplog.text
    (folder / "train.csv").write_text("x,y\n1.0,1\n2.0,3\n")
    numbers = hf(path="csv", data_files=str(folder / "train.csv"), inputs="x")
    assert numbers.found_sizes == {"classes": 4}


def image_rows(tmp_path, images):
    """Write a data set of these images as a folder of save_to_disk, and return its path."""
    from datasets import Dataset, Features, Value
    from datasets import Image as Column

    features = Features({"x": Column(), "y": Value("int64")})
    rows = Dataset.from_dict({"x": images, "y": [0] * len(images)}, features=features)
    rows.save_to_disk(tmp_path / "images")
    return str(tmp_path / "images")


def grey_images(count):
    """Images that show grey, of four modes that store it differently."""
    images = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (4, 4)).astype(np.uint8)
        image = Image.fromarray(pixels)
        as_palette = image.convert("RGB").quantize(16)
        images.append([image, as_palette, image.convert("1"), image.convert("LA")][i % 4])
    return images


@pytest.mark.guarantee
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mode", [None, "L", "RGB"])
def test_images_of_mixed_modes_have_the_brightness_they_show(hf, tmp_path, streaming, mode):
    images = grey_images(40)
    if mode == "RGB":
        images[1] = Image.new("RGB", (4, 4), (9, 80, 200)).quantize(4)
    path = image_rows(tmp_path, images)
    for typed in (mode, None):
        data = hf(path=path, inputs="x", streaming=streaming, image_mode=typed)
        data.saved = {"image_mode": [mode] * (typed != mode)}  # of the images in training
        for image, sample in zip(images, data.dataset("train"), strict=True):
            expected = np.array(image.convert(mode or "L"), np.float32).reshape(4, 4, -1) / 255
            assert np.array_equal(sample["inputs"].numpy(), expected.transpose(2, 0, 1))


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("image", "says"),
    [
        (Image.new("RGB", (4, 4), (255, 0, 0)), "mode RGB, which shows more than L"),
        (Image.new("RGB", (4, 4), (255, 0, 0)).quantize(4), "mode P, which shows more than L"),
        (Image.new("LA", (4, 4), (9, 100)), "mode LA, which shows more than L"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_image_that_shows_more_than_the_first_is_refused(hf, tmp_path, image, says, streaming):
    images = [Image.new("L", (4, 4), 7)] * 200
    images[101] = image
    path = image_rows(tmp_path, images)
    found = hf(path=path, inputs="x", streaming=streaming).dataset("train")
    with pytest.raises(ConfigError, match=rf"{says}, .*Type data.image_mode=RGB"):
        list(found if streaming else (found[i] for i in range(200)))


@pytest.mark.guarantee
@pytest.mark.parametrize("streaming", [False, True])
def test_folders_of_save_to_disk_are_read(hf, tmp_path, streaming):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features({"x": Value("float32"), "y": ClassLabel(names=["b", "a"])})
    rows = Dataset.from_dict({"x": range(10), "y": [0, 1] * 5}, features=features)
    rows.save_to_disk(tmp_path / "one")
    parts = {"train": rows.select(range(7)), "validation": rows.select(range(7, 10))}
    DatasetDict(parts).save_to_disk(tmp_path / "several")
    for name, splits in {
        "one": {"train": "train[:70%]", "val": "train[70%:]", "test": None},
        "several": {"train": "train", "val": "validation", "test": None},
    }.items():
        data = hf(path=str(tmp_path / name), inputs="x", splits=splits, streaming=streaming)
        for split, expected in (("train", range(7)), ("val", range(7, 10))):
            samples = list(data.dataset(split)) if streaming else [*data.dataset(split)]
            assert [sample["inputs"].item() for sample in samples] == list(expected)
            assert [sample["targets"].item() for sample in samples] == [i % 2 for i in expected]
        assert data.classes == ["b", "a"]
    lone = hf(path=str(tmp_path / "one"), inputs="x", splits={"train": "train", "val": "nosuch"})
    with pytest.raises(ConfigError, match=r'split nosuch: .*"nosuch".*Type data.splits.val=…'):
        lone.dataset("val")


@pytest.mark.guarantee
def test_linked_folders_that_datasets_leaves_out_are_refused(hf, tmp_path):
    write_images(tmp_path / "images", 2)
    write_images(tmp_path / "scratch", 2)
    (tmp_path / "images" / "cat" / "more").symlink_to(tmp_path / "scratch" / "cat")
    with pytest.raises(ConfigError, match=r"more is a link to a folder, .*data=image_folder"):
        hf(path="imagefolder", data_dir=str(tmp_path / "images"), inputs="image").dataset("train")


def test_a_test_split_without_labels_is_left_out(hf, tmp_path, caplog):
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"x": Value("float32"), "y": ClassLabel(names=["no", "yes"])})
    files = {"train": [0, 1], "test": [-1, -1]}
    for name, labels in files.items():
        Dataset.from_dict({"x": [1.0, 2.0], "y": labels}, features=features).to_parquet(
            tmp_path / f"{name}.parquet"
        )
    data = hf(
        path="parquet",
        data_files={name: str(tmp_path / f"{name}.parquet") for name in files},
        inputs="x",
    )
    data.splits = {"train": "train", "val": "test", "test": "test"}
    caplog.set_level("INFO", logger="armature")
    assert list(data.test_dataloader()) == []
    assert "split test: column y holds -1, which is no class: the run does not test" in caplog.text
    with pytest.raises(ConfigError, match=r"column y holds -1, .*data.splits.val=…"):
        data.dataset("val")
    assert len(data.dataset("predict")) == 2


@pytest.mark.slow
@pytest.mark.guarantee
def test_a_test_split_that_is_not_there_is_named_before_the_training(hf, tmp_path):
    words = "task=example model=example data=hf data.path=csv data.inputs=[width,height]"
    files = f"data.data_files={write_table(tmp_path / 't.csv')}"
    words = [*words.split(), files, "data.targets=kind", "data.splits.val=train"]
    ended = call("train.py", *words, "trainer.max_steps=2", cwd=tmp_path, code=2)
    assert 'split test: ValueError: Unknown split "test"' in ended.stderr
    assert "val/loss" not in ended.stdout + ended.stderr
