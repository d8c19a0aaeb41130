"""Small random classifiers of transformers. Called by extras.call."""

from typing import Any

from tests.finetune.transformers_models import TINY

ENCODER = {
    **TINY,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": {
        **ENCODER,
        "max_position_embeddings": 66,
        "pad_token_id": 1,
    },  # positions begin after the padding's
    "llama": TINY,  # no padding token; its plan shards matrices
    "qwen3": {**TINY, "tie_word_embeddings": True, "head_dim": 16},
}
CONTEXT, CLASSES = 32, 3


def make(root: str) -> None:
    """Write folders with heads of 3 classes, and "bert-words" with a head for words."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

    def save(model: Any, name: str) -> None:
        for own, value in model.named_parameters():
            if value.ndim == 1:
                nn.init.normal_(value, 1.0 if "norm" in own.lower() else 0.0, 0.2)
        model.save_pretrained(f"{root}/{name}", max_shard_size="160KB")

    for kind, sizes in KINDS.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **sizes, num_labels=CLASSES)
        save(AutoModelForSequenceClassification.from_config(config), kind)
    save(AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **ENCODER)), "bert-words")


def logits(root: str) -> dict[str, float]:
    """Return the largest difference of logits to transformers' own, for each kind."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from armature.models.huggingface.model import SequenceClassifier
    from tests.finetune import folders

    ids, found = torch.randint(3, 320, (3, CONTEXT), generator=torch.Generator().manual_seed(3)), {}
    ids[0, 7:], ids[1, 20:] = -100, -100
    for kind in KINDS:
        model = folders.read(
            SequenceClassifier, pretrained=f"{root}/{kind}", context=CONTEXT, classes=CLASSES
        )
        theirs = AutoModelForSequenceClassification.from_pretrained(
            f"{root}/{kind}", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            alone = torch.cat(
                [theirs(row[row >= 0][None]).logits for row in ids]
            )  # each without padding
            found[kind] = float((model(ids) - alone).abs().max())
    return found


def fit(root: str, kind: str, layouts: list[str], adapter: bool) -> dict[str, Any]:
    """Return how far each layout's training is from one process's."""
    from tests.finetune import layouts as compare
    from tests.support.parity import harness

    model = kind.partition("-")[0]
    harness.PRELOAD.append(f"transformers.models.{model}.modeling_{model}")
    head = "score" if model in ("llama", "qwen3") else "classifier"
    return compare.fit(
        layouts,
        model="armature.models.huggingface.model.SequenceClassifier",
        adapter={"rank": 4, "alpha": 8.0, "train": [f"inner.{head}"]} if adapter else None,
        model_args={
            "pretrained": f"{root}/{kind}",
            "context": CONTEXT,
            "vocab_size": 320,
            "classes": CLASSES,
        },
    )
