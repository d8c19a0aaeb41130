"""The JSON Schemas of configs/.schema/, with which editors complete and check keys."""

import json

import jsonschema
import pytest
import yaml
from omegaconf import OmegaConf
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from armature import project
from armature.command import schema
from tests.shipped import LINE, is_shipped

FILES = sorted(filter(is_shipped, project.CONFIGS.rglob("*.yaml")))


@pytest.fixture(scope="module")
def schemas():
    return schema.schemas()


@pytest.fixture(scope="module")
def problems(schemas):
    registry = Registry().with_resources(
        (f"{name}.json", DRAFT202012.create_resource(text)) for name, text in schemas.items()
    )

    def found(name, content):
        validator = jsonschema.Draft202012Validator({"$ref": f"{name}.json"}, registry=registry)
        return [error.message for error in validator.iter_errors(content)]

    return found


def test_the_files_in_configs_are_of_today(schemas):
    """`make schema` writes them, also after a class of your own has got a new argument."""
    folder = project.CONFIGS / ".schema"
    written = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert written == schemas, "type make schema"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(project.CONFIGS)))
def test_every_shipped_file_names_a_schema_that_accepts_it(path, problems):
    (line,) = [each for each in path.read_text().splitlines() if each.startswith(LINE)]
    named = path.parent / line.removeprefix(LINE)
    assert named.resolve().parent == project.CONFIGS / ".schema"
    assert problems(named.stem, OmegaConf.to_container(OmegaConf.load(path))) == []


@pytest.mark.parametrize(
    ("name", "text"),
    {
        "a key of the core": ("trainer", "max_stepz: 100"),
        "a type": ("trainer", "max_steps: many"),
        "a range": ("checkpoint", "keep_last: 0"),
        "a choice": ("train", "trainer: {precision: fp16}"),
        "an argument": ("model", "{_target_: example.model.ResidualMLP, witdh: 3}"),
        "an argument's type": ("model", "{_target_: example.model.ResidualMLP, layers: four}"),
        "a key of an option without a class": ("strategy", "{defaults: [mesh], tensr: 2}"),
        "a nested node": (
            "data",
            "{_target_: armature.data.text.TextData, source: "
            "{_target_: armature.data.corpus.Corpus, vocabulary: 300}}",
        ),
        "a callback": ("callbacks", "ema: {_target_: armature.callbacks.ema.EMA, decay: 2}"),
        "a group in a defaults list": ("train", "defaults: [{override /modle: gpt_nano}]"),
        "a group": ("train", "optimiser: {lr: 1.0e-3}"),
        "a list for text": ("train", "run: {name: [a]}"),
    }.values(),
)
def test_what_a_run_would_refuse_is_refused(name, text, problems):
    assert problems(name, yaml.safe_load(text))
