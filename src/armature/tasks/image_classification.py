"""One class for each image."""

from armature.tasks.classification import Classification


class ImageClassification(Classification):
    """Logs the loss in nats per image, and accuracy: see `Classification`."""

    modality = "images"
