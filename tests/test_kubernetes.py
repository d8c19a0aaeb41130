"""The manifest in kubernetes/ against the models that the Kubeflow Trainer publishes of its
schema.
"""

import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

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
