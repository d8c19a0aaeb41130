"""The manifest in kubernetes/ against the models that the Kubeflow Trainer publishes of its
schema.
"""

import copy

import pytest
import yaml
from hydra import compose, initialize_config_dir
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from armature import config
from tests import running


@pytest.fixture
def manifest():
    return yaml.safe_load((running.ROOT / "kubernetes" / "trainjob.yaml").read_text())


def accepted(manifest: dict) -> bool:
    """Whether every field has a place in the schema and the right type: the models drop what they
    do not know.
    """
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    return job.to_dict() == manifest


def test_the_manifest_is_of_the_published_schema(manifest):
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert accepted(manifest)


def test_a_misspelt_field_or_a_wrong_type_would_be_noticed(manifest):
    misspelt, wrong = copy.deepcopy(manifest), copy.deepcopy(manifest)
    misspelt["spec"]["trainer"]["numNods"] = 2
    assert not accepted(misspelt)
    wrong["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        accepted(wrong)


def test_nodes_and_devices_agree_with_the_overrides(manifest):
    trainer = manifest["spec"]["trainer"]
    assert trainer["command"][:2] == ["torchrun", "train.py"]
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(running.ROOT / "configs")):
        cfg = compose("train", overrides=trainer["command"][2:])
    assert (cfg.trainer.num_nodes, cfg.trainer.devices) == (
        trainer["numNodes"],
        trainer["numProcPerNode"],
    )
    assert str(cfg.trainer.devices) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    patch = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ][0]
    mounts = patch["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert cfg.run.root in [mount["mountPath"] for mount in mounts]
    assert cfg.run.name is not None
