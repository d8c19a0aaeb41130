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
# # 1. A first run, and its trained model
#
# A small vision transformer learns handwritten digits, in about 20 seconds on two CPU cores. You
# see the command, the folder that it leaves, its curves, and how other programs use the result.

# %%
from tools import curves, fresh, run

folder = fresh("1")

# %%
command = "python train.py experiment=digits trainer.max_epochs=5 trainer.val_every_n_steps=16"
run(f"{command} run.name=digits", folder=folder)

# %% [markdown]
# ## The run directory
# Everything that a run leaves is in one folder. Open `report.html` in a browser: it has the curves,
# the configuration, speed and memory.

# %%
digits = folder / "outputs" / "digits"
print(*(path.name + "/" * path.is_dir() for path in sorted(digits.iterdir())), sep="\n")

# %% [markdown]
# `metrics.csv` has one row per optimizer step. A validation fills further columns of its step.

# %%
print((digits / "metrics.csv").read_text()[:300])
curves({"digits": digits}, "train/loss")
curves({"digits": digits}, "val/accuracy")

# %% [markdown]
# ## A mistake costs seconds
# All problems of a command are listed together, with the nearest names, before anything starts.

# %%
run("python train.py experiment=digits trainer.max_epoch=8 optimizer=moun", folder=folder, expect=2)

# %% [markdown]
# ## Load the trained model
# The run directory is enough: it names the classes. The module is on the CPU, in eval mode.

# %%
import torch
from torch.utils.data import DataLoader

import armature
from armature.data.digits import DigitsData

module = armature.load(digits)
data = DigitsData()
data.prepare_data()
data.setup("test")
batch = next(iter(DataLoader(data.dataset("test"), batch_size=32)))
with torch.inference_mode():
    predicted = module.predict_step(batch, 0)["class"]
right = (predicted == batch["targets"]).float().mean().item()
assert right > 0.8
print(predicted[:12].tolist(), batch["targets"][:12].tolist(), f"{right:.0%} right")

# %% [markdown]
# ## Predict a whole split
# One row per sample, in the order of the data.

# %%
run("python scripts/predict.py outputs/digits out=predictions.csv --accelerator cpu", folder=folder)
print((folder / "predictions.csv").read_text()[:100])

# %% [markdown]
# ## Export
# `torch.export` makes a program, which needs no class of this project.

# %%
inputs = batch["inputs"]
torch.export.save(torch.export.export(module.model, (inputs,)), folder / "model.pt2")
with torch.inference_mode():
    exported, own = torch.export.load(folder / "model.pt2").module()(inputs), module.model(inputs)
torch.testing.assert_close(exported, own, rtol=1e-4, atol=1e-5)
"the exported program computes the same"
