"""The manifest in kubernetes/ against the models that the Kubeflow Trainer publishes of its
schema.
"""

import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tests import running


def test_the_manifest_is_of_the_published_schema():
    """Every field has a place in the schema and the right type: the models drop what they do not
    know.
    """
    manifest = yaml.safe_load((running.ROOT / "kubernetes" / "trainjob.yaml").read_text())
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest
