"""The adapters of a run as a folder that peft loads: adapter_config.json and
adapter_model.safetensors.
"""

import json
from pathlib import Path

from omegaconf import DictConfig
from safetensors.torch import save_file

from armature import files
from armature.checkpoint import convert
from armature.errors import ConfigError
from armature.finetune import base, check, folder, others
from armature.finetune.export import adapter_of, write_tokenizer
from armature.models.adapters import is_adapter
from armature.models.decoder.names import theirs
from armature.models.wrapped import module_name


def export(cfg: DictConfig, checkpoint: Path, target: Path, *, average: bool = False) -> str:
    """Write the folder, and return what was written, as a line.

    The base model is not read.

    Raises ConfigError for a run without adapters, and for one that trained other weights as well,
    which the form lacks.
    """
    adapter = adapter_of(cfg)
    if adapter is None:
        raise ConfigError(
            f"{cfg.run.dir}: the run has no adapters (task.adapter). Leave --adapter out."
        )
    if adapter.train:
        raise ConfigError(
            f"{cfg.run.dir}: the run trained task.adapter.train={adapter.train} as well, which an "
            "adapter's folder does not hold. Leave --adapter out: the whole model is written."
        )
    rename = module_name if check.is_of_transformers(cfg) else theirs
    tensors, modules = {}, set[str]()
    for name, value in convert.weights_of(checkpoint, average=average).items():
        owner, _, part = name.removeprefix(convert.MODEL).rpartition(".")
        if is_adapter(name):
            module = str(rename(f"{owner}.weight")).removesuffix(".weight")
            modules.add(module)
            tensors[f"base_model.model.{module}.{part}.weight"] = value.contiguous()
    config = {
        "peft_type": "LORA",
        # with that for classifiers peft would look for a head in the folder
        "task_type": None if cfg.model._target_ == others.CLASSIFIER else "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "base_model_name_or_path": base.name_of(cfg, checkpoint),
        "target_modules": sorted(modules),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
    }
    with files.replacing(target) as part:
        part.mkdir()
        files.replace(part / "adapter_config.json", json.dumps(config, indent=2) + "\n")
        save_file(tensors, part / "adapter_model.safetensors", metadata={"format": "pt"})
        files.sync(part / "adapter_model.safetensors")
        write_tokenizer(folder.kept_in(Path(cfg.run.dir)), Path(cfg.run.dir), part)
    size = sum(value.numel() for value in tensors.values())
    return f"{target}: {len(modules)} adapters of rank {adapter.rank}, {size:,} parameters"
