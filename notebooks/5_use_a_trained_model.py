# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Use a trained model
#
# Load it, predict, export it, and train its task under a stock `L.Trainer`.

# %%
import torch
from tools import fresh, run

folder = fresh("5")
digits = "python train.py experiment=digits trainer.max_epochs=5 logger=none run.name=digits"
run(digits, folder=folder)

# %% [markdown]
# ## Load
# No class and no command is needed: the run directory names them. The module is on the CPU and in
# eval mode.

# %%
import armature

module = armature.load(folder / "outputs" / "digits")
type(module).__name__, sum(p.numel() for p in module.parameters())

# %%
from torch.utils.data import DataLoader

from armature.data.digits import DigitsData

data = DigitsData()
data.prepare_data()
data.setup("test")
batch = next(iter(DataLoader(data.dataset("test"), batch_size=32)))
with torch.inference_mode():
    predicted = module.predict_step(batch, 0)
right = (predicted["class"] == batch["targets"]).float().mean().item()
assert right > 0.8
print(predicted["class"][:12].tolist(), batch["targets"][:12].tolist(), f"{right:.0%} right")

# %% [markdown]
# ## Predict a whole split
# One row per sample, in the order of the data; with `trainer.devices=2` from two processes.

# %%
run("python scripts/predict.py outputs/digits out=predictions.csv --accelerator cpu", folder=folder)
print((folder / "predictions.csv").read_text()[:120])

# %% [markdown]
# ## Export
# `model.safetensors` has the weights, `model.pt2` a program of `torch.export` that needs no class
# of this project.

# %%
run("python scripts/convert.py outputs/digits model.safetensors", folder=folder)
run("python scripts/convert.py outputs/digits model.pt2", folder=folder)

# %%
program = torch.export.load(folder / "model.pt2").module()
with torch.inference_mode():
    exported, own = program(batch["inputs"]), module.model(batch["inputs"])
torch.testing.assert_close(exported, own, rtol=1e-4, atol=1e-5)
"the exported program computes the same"

# %% [markdown]
# ## The task under a stock `L.Trainer`
# A Task is a LightningModule: Lightning's own Trainer trains it further, with plain DataLoaders,
# and without our strategies, resume and checks.

# %%
import logging
import warnings

import lightning as L

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("ignore", category=FutureWarning)  # torch, of Lightning's own code
train, held_out = (
    DataLoader(data.dataset(split), batch_size=64, shuffle=split == "train")
    for split in ("train", "val")
)
trainer = L.Trainer(
    max_steps=40,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
(before,) = trainer.validate(module, held_out, verbose=False)
trainer.fit(module.train(), train)
(after,) = trainer.validate(module, held_out, verbose=False)
assert after["val/accuracy"] > 0.8
before, after
