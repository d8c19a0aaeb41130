import pytest
from omegaconf import OmegaConf

from armature.data import feed
from scripts import reference
from tests.data.feeding import config

# built in test_chat_data, test_labeled_text, test_people_data and test_preference_data
ELSEWHERE = {
    "_loader",
    "blend",
    "chat",
    "hf",
    "image_folder",
    "labeled_text",
    "preference",
    "table",
    "tokens",
}
FILES = [path for path in reference.files() if path.parent.name == "data"]
CONFIGS = sorted(file for file in FILES if file.stem not in ELSEWHERE)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_a_data_module(path, tmp_path, monkeypatch):
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a book\n" for i in range(4000)))
    cfg = OmegaConf.create({"seed": 3, "model": {}, "data": config(path.stem)})
    cfg.data.micro_batch_size = "auto"
    if OmegaConf.is_missing(cfg.data, "path"):
        cfg.data.path = str(tmp_path / "book.txt")
    fed = feed.build(cfg)
    assert fed.seed == 3
    if path.stem != "stdlib":  # prepared in test_text.py
        fed.data.prepare_data()
        fed.set_up()
        batch = next(iter(fed.train_loader()))
        assert len(batch["inputs"]) == cfg.data.global_batch_size
