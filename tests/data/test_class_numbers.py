"""Classes are numbered in the order of what their names stand for, by every reader."""

import json

import pytest

from tests import running

pytestmark = pytest.mark.guarantee
NUMBERS = [str(i) for i in range(12)]


def rows(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["table", "image_folder", "hf"])
def test_twelve_numbered_classes_keep_their_numbers(reader, tmp_path):
    """A run writes which number each class has; sorted as texts, 10 would come before 2."""
    experiment = {
        "table": ["data=table", f"data.path={tmp_path}/rows.csv", "data.target=label"],
        "image_folder": ["data=image_folder", f"data.path={tmp_path}/images", "data.size=8"],
        "hf": [
            "data=hf",
            "data.path=csv",
            f"data.data_files={tmp_path}/rows.csv",
            "data.inputs=[x]",
            "data.targets=name",
            "data.splits={train:train,val:train,test:train}",
        ],
    }[reader]
    lines = [f"{i % 12},{i % 12},n{i % 12}" for i in range(96)]
    (tmp_path / "rows.csv").write_text(rows(["x,label,name", *lines]))
    model = ["model=example", "model.features=1", "model.classes=12"]
    if reader == "table":
        experiment.append("data.features=[x]")
    if reader == "image_folder":
        model = ["model=vit_tiny", "model.image_size=8", "model.patch_size=4"]
        model += ["model.classes=12", "model.channels=3"]
        image = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
        for name in NUMBERS:
            (tmp_path / "images" / name).mkdir(parents=True)
            for i in range(8):
                image.save(tmp_path / "images" / name / f"{i}.png")
    train(tmp_path, *experiment, *model, "data.global_batch_size=12")
    names = json.loads((tmp_path / "outputs/run/classes.json").read_text())["classes"]
    assert names == ([f"n{i}" for i in range(12)] if reader == "hf" else NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["csv", "parquet", "hf"])
def test_texts_that_pandas_calls_empty_are_texts(reader, tmp_path):
    """NA (Namibia), None and null are classes as any other; an empty cell is an empty cell."""
    names = ["NA", "None", "null", "nan"]
    lines = [f"{i % 4},{names[i % 4]}" for i in range(48)]
    (tmp_path / "rows.csv").write_text(rows(["x,name", *lines]))
    source = [f"data.path={tmp_path}/rows.csv", "data=table", "data.target=name"]
    if reader == "parquet":
        parquet, arrow = (pytest.importorskip(f"pyarrow{each}") for each in (".parquet", ""))
        columns = {"x": [i % 4 for i in range(48)], "name": [names[i % 4] for i in range(48)]}
        parquet.write_table(arrow.table(columns), tmp_path / "rows.parquet")
        source[0] = f"data.path={tmp_path}/rows.parquet"
    if reader == "hf":
        source = ["data=hf", "data.path=csv", f"data.data_files={tmp_path}/rows.csv"]
        source += ["data.inputs=[x]", "data.targets=name"]
        source += ["data.splits={train:train,val:train,test:train}"]
    model = ["model=example", "model.features=1", "model.classes=4"]
    train(tmp_path, *source, *model, "data.global_batch_size=12")
    found = json.loads((tmp_path / "outputs/run/classes.json").read_text())["classes"]
    assert sorted(found) == sorted(names)


def train(folder, *overrides: str) -> None:
    fixed = ["task=image_classification", "optimizer=adamw", "logger=none", "run.name=run"]
    fixed += ["trainer.accelerator=cpu", "trainer.max_steps=1", "trainer.limit_val_batches=1"]
    command = ["python", str(running.ROOT / "train.py"), *overrides, *fixed]
    command.append("trainer.test_at_end=false")
    result = running.run(command, cwd=folder, env=running.environment())
    assert result.returncode == 0, result.stderr[-3000:]
