"""Classes and columns keep their numbers with other data: names are saved beside the run."""

import json
import shutil

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

import armature
from armature import worker
from armature.data.feed import Feed
from armature.data.labels import CLASSES_FILE
from armature.errors import ConfigError
from armature.layout import Layout
from armature.training import predict
from armature.validation import relations
from tests.data import chat_parts
from tests.data.feeding import build, feed
from tests.data.test_people_data import write_images

ROWS = "".join(f"{i},{i / 2},{kind}\n" for i, kind in enumerate(["ant", "bee", "cow"] * 10))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def table(file, text, **changes):
    file.write_text(text)
    return build("table", path=str(file), target="kind", **changes)


def used_by(run, data):
    data.load_assets(run)
    return data


@pytest.fixture
def trained_table(tmp_path, run):
    data = table(tmp_path / "train.csv", f"width,height,kind\n{ROWS}")
    data.save_assets(run)
    return data


NUMBERED = [  # names in the order of their numbers
    [str(i) for i in range(12)],
    ["-1", "0", "1", "2.5", "10"],
    ["00", "01", "02", "10"],
    ["9", "10", "other"],
    ["class_1", "class_2", "class_10"],
    ["NA", "None", "a", "null"],
    ["no", "yes"],
]


def numbers_of(reader, names, folder, hf):
    """Return the number that a reader gives to the class of each name."""
    rows = [(name, i) for i, name in enumerate(names)] * 3
    file = folder / "rows.csv"
    file.write_text("kind,x\n" + "".join(f"{name},{i}\n" for name, i in rows))
    if reader == "image_folder":
        for name, i in rows:
            (folder / "images" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / "images" / name / "1.png")
        data = build("image_folder", path=str(folder / "images"), size=8, num_workers=0)
        found = {path.parent.name: number for path, number in data.dataset("predict").files}
        return [found[name] for name in names]
    if reader == "table":
        targets = build("table", path=str(file), target="kind").dataset("predict").targets
    elif reader == "labeled_text":
        tokenizer = str(chat_parts.folder(folder / "tokenizer"))
        changes = {"path": str(file), "tokenizer": tokenizer, "text": "x", "target": "kind"}
        targets = build("labeled_text", **changes).dataset("predict").targets
    else:
        from datasets import Dataset

        Dataset.from_dict(
            {"kind": [name for name, _ in rows], "x": [i for _, i in rows]}
        ).to_parquet(folder / "rows.parquet")
        rows = str(folder / "rows.parquet")
        data = hf(path="parquet", data_files=rows, inputs="x", targets="kind")
        targets = torch.stack([row["targets"] for row in data.dataset("train")])
    assert targets.tolist() == targets[: len(names)].tolist() * 3
    return targets[: len(names)].tolist()


@pytest.mark.guarantee
@pytest.mark.parametrize("names", NUMBERED, ids=lambda names: names[-1])
@pytest.mark.parametrize("reader", ["table", "labeled_text", "image_folder", "hf"])
def test_classes_are_numbered_in_the_order_of_the_numbers_in_their_names(
    reader, names, tmp_path, request
):
    hf = request.getfixturevalue("hf") if reader == "hf" else None
    assert numbers_of(reader, names, tmp_path, hf) == [*range(len(names))]


def test_a_resume_keeps_the_numbers_of_the_run(tmp_path, run):
    data = table(tmp_path / "t.csv", "x,kind\n1,10\n2,9\n3,10\n4,9\n")
    (run / CLASSES_FILE).write_text('{"features": ["x"], "classes": ["10", "8", "9"]}')
    data.load_assets(run)
    assert data.dataset("predict").targets.tolist() == [0, 2, 0, 2]
    data.save_assets(run)
    assert json.loads((run / CLASSES_FILE).read_text())["classes"] == ["10", "8", "9"]
    again = table(tmp_path / "t.csv", "x,kind\n1,10\n2,9\n3,10\n4,9\n")
    state, fed = Feed(data).state_dict(), Feed(again)
    with pytest.raises(ConfigError, match=r"classes .* 8 is missing"):
        fed.load_state_dict(state)
    again.load_assets(run)
    fed.load_state_dict(state)


@pytest.mark.parametrize("kept", ["run", "checkpoint_root/run"])
def test_training_samples_have_the_numbers_that_the_weights_know(
    tmp_path, run, trained_table, monkeypatch, kept
):
    (run / "config.yaml").touch()
    few = tmp_path / "few.csv"
    few.write_text("width,height,kind\n" + "1,2,bee\n3,4,cow\n" * 9)
    cfg = armature.compose(
        "experiment=example", "data=table", f"data.path={few}", "data.target=kind",
        "model.features=2", "model.classes=3",
    )  # fmt: skip
    cfg.run.dir = str(tmp_path if kept == "run" else run)
    monkeypatch.setattr(worker, "_checkpoint_to_resume", lambda *_: tmp_path / kept)
    fed, *_ = worker._build_feed(cfg, Layout.of(cfg))
    assert {*fed._train.dataset.targets.tolist()} == {1, 2}


def test_a_class_and_columns_that_the_model_does_not_know_are_named(tmp_path, run, trained_table):
    unknown = used_by(run, table(tmp_path / "o.csv", "width,height,kind\n1,2,yak\n1,2,ant\n"))
    with pytest.raises(
        ConfigError,
        match=r"column kind has the class yak, which the training data lack. They have 3",
    ):
        unknown.dataset("test")
    assert unknown.dataset("predict").targets is None
    with pytest.raises(
        ConfigError, match=r"has no column height. Its columns: width, kind. Type data.features=…"
    ):
        used_by(run, table(tmp_path / "o.csv", "width,kind\n1,ant\n")).dataset("predict")
    with pytest.raises(ConfigError, match=r"but the model was trained with \['width', 'height'\]"):
        used_by(
            run, table(tmp_path / "o.csv", f"width,height,kind\n{ROWS}", features=["height"])
        ).dataset("test")


def test_sizes_that_only_the_data_tell(trained_table):
    assert trained_table.found_sizes == {"features": 2, "classes": 3}
    model = OmegaConf.create({"_target_": "example.model.ResidualMLP", "features": 2, "classes": 4})
    relations.check_found_sizes(model, trained_table.found_sizes)
    model.update(features=5, classes=2, pretrained="base", vocab_size=8)
    with pytest.raises(ConfigError) as refused:
        relations.check_found_sizes(model, {**trained_table.found_sizes, "vocab_size": 9})
    assert refused.value.problems == [
        "model.features=5, but the data need 2. Type model.features=2.",
        "model.classes=2, but the data need at least 3. Type model.classes=3.",
        "model.vocab_size=8, but the data need at least 9. Type data.source.vocab_size=8.",
    ]


class Zeros(LightningModule):
    def predict_step(self, batch, batch_idx):
        return {"class": torch.full([len(batch["inputs"])], 1)}


def predicted(data, file):
    trainer = predict.make_trainer(
        file,
        run_dir=file.parent,
        rank=0,
        ranks=1,
        accelerator="cpu",
        precision="32-true",
    )
    predict.predict(Zeros(), data if isinstance(data, Feed) else Feed(data), trainer)
    return [json.loads(line)[1] for line in file.read_text().splitlines()]


def test_images_keep_their_classes_and_predictions_name_them(tmp_path, run):
    options = {"size": 8, "num_workers": 0}
    write_images(tmp_path / "all", 4)
    build("image_folder", path=str(tmp_path / "all"), **options).save_assets(run)
    shutil.move(tmp_path / "all" / "dog", tmp_path / "other" / "test" / "dog")
    other = used_by(run, build("image_folder", path=str(tmp_path / "other"), **options))
    assert [target for _, target in other.dataset("test").files] == [1] * 4
    assert [row["class"] for row in predicted(other, tmp_path / "p.jsonl")] == ["dog"] * 4
    flat = used_by(
        run, build("image_folder", path=str(tmp_path / "other" / "test" / "dog"), **options)
    )
    assert list(next(iter(flat.predict_dataloader().loader))) == ["inputs"]
    rows = predicted(flat, tmp_path / "p.jsonl")
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["file"] == str(tmp_path / "other" / "test" / "dog" / "0.png")
    shutil.move(tmp_path / "other" / "test" / "dog", tmp_path / "other" / "test" / "yak")
    with pytest.raises(
        ConfigError, match=r"has the class yak, which the training data lack. They have 2: cat, dog"
    ):
        used_by(run, build("image_folder", path=str(tmp_path / "other"), **options)).dataset("test")


def test_classes_of_hugging_face_datasets(tmp_path, run, hf):
    def of(text, name):
        (tmp_path / name).write_text(text)
        splits = {"train": "train", "val": None, "test": "train"}
        files = str(tmp_path / name)
        return hf(path="csv", data_files=files, inputs="x", targets="k", splits=splits)

    data = of("x,k\n1,bee\n2,ant\n3,cow\n4,bee\n", "t.csv")
    assert [data.dataset("train")[i]["targets"].item() for i in range(4)] == [1, 0, 2, 1]
    data.save_assets(run)
    other = used_by(run, of("x,k\n1,cow\n2,bee\n", "o.csv"))
    assert [other.dataset("test")[i]["targets"].item() for i in range(2)] == [2, 1]
    assert list(used_by(run, of("x\n1\n", "n.csv")).dataset("predict")[0]) == ["inputs"]
    with pytest.raises(ConfigError, match=r"column k, has the class yak"):
        used_by(run, of("x,k\n1,yak\n", "y.csv")).dataset("test")
    texts = of("x,k\n1,a long text\n2,another\n", "texts.csv")
    texts.texts_are_classes = False
    assert texts.dataset("train")[0]["targets"] == "a long text"
    assert texts.names() == {}
    with pytest.raises(ConfigError, match=r"column x has 1 empty cells"):
        of("x,k\n1,a\n,b\n", "e.csv").dataset("train")
    with pytest.raises(ConfigError, match=r"column k has 1 empty cells"):
        of("x,k\n1,a\n2,b\n3,\n", "f.csv").setup("fit")
    with pytest.raises(
        ConfigError, match=r"data.path=csv: the training data have the class a alone"
    ):
        of("x,k\n1,a\n2,a\n", "g.csv").setup("fit")


class Named(Dataset):
    """As torchvision's: classes in the order of their numbers."""

    def __init__(self, *classes):
        self.classes = list(classes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"inputs": torch.ones(1), "targets": index % 2}


class Folders(LightningDataModule):
    def __init__(self, *classes):
        super().__init__()
        self.data = Subset(Named(*classes), range(4))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=2)

    test_dataloader = val_dataloader = train_dataloader


def test_classes_of_a_plain_data_module_keep_their_numbers(tmp_path, run):
    data = feed(Folders("cat", "dog"))
    data.assets.save_assets(run)
    other = feed(Folders("ant", "cat", "dog"))
    other.assets.load_assets(run)
    for split in ("test", "val"):
        with pytest.raises(
            ConfigError, match=rf"the {split} data number other classes .*ant is new. Each class"
        ):
            other.loaders(split)
    assert [row["class"] for row in predicted(other, tmp_path / "p.jsonl")] == [
        "dog"
    ] * 4  # as in training
    with pytest.raises(
        ConfigError,
        match=r"no longer those that the checkpoint was trained with: ant is new. Restore",
    ):
        other.load_state_dict(data.state_dict())
    same = feed(Folders("cat", "dog"))
    same.load_state_dict(data.state_dict())
    assert len(same.loaders("test")[0]) == 2
