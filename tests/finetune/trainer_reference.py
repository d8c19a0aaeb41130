"""The training of transformers' Trainer, and of peft.

Called by extras.call.

A job has base, batches (safetensors: inputs, targets and, if packed, documents of all
micro-batches, in order), micro_batch, accumulate, lr, eps, clip, lora (arguments of peft's
LoraConfig, or null), start (safetensors of A and B) and out, a folder.
"""

import torch


def rows(batches: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return rows with one more token: transformers shifts the labels itself."""
    found = []
    for i, (inputs, targets) in enumerate(zip(batches["inputs"], batches["targets"], strict=True)):
        ids = torch.cat([inputs, targets[-1:].clamp(min=0)])
        row = {"input_ids": ids, "labels": torch.cat([torch.tensor([-100]), targets])}
        if (
            "documents" in batches
        ):  # positions that begin anew are how transformers knows packed rows
            documents = batches["documents"][i]
            documents = torch.cat([documents, documents[-1:]])
            positions = torch.arange(len(ids))
            row["position_ids"] = positions - torch.searchsorted(documents.contiguous(), documents)
        found.append(row)
    return found


def train(job: dict) -> list[float]:
    """Return the loss of each optimizer step."""
    from safetensors.torch import load_file
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    model = AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)
    if job["lora"] is not None:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **job["lora"]))
        result = set_peft_model_state_dict(model, load_file(job["start"]))
        assert not result.unexpected_keys, result.unexpected_keys

    class Recording(Trainer):
        """Takes the rows as they come, and keeps each loss as it is, where the log rounds it."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.losses = []

        def _get_train_sampler(self, *args, **kwargs):
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(float(loss))
            return loss

    data = rows(load_file(job["batches"]))
    arguments = TrainingArguments(
        output_dir=job["out"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["accumulate"],
        num_train_epochs=1,
        learning_rate=job["lr"],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=job["clip"],
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Recording(model, arguments, train_dataset=data, data_collator=default_data_collator)
    trainer.train()
    losses = torch.tensor(trainer.losses).view(-1, job["accumulate"])
    return losses.sum(dim=1).tolist()  # each is its micro-batch's share of the step's loss
