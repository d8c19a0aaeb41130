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
# # 1. A first run, and its curves
#
# A small vision transformer learns handwritten digits: some seconds on two CPU cores. You see the
# command, the folder that it leaves, its curves, and what a mistake in the command looks like.

# %%
from tools import curves, fresh, history, run

folder = fresh("1")

# %%
digits = "python train.py experiment=digits trainer.max_epochs=5 trainer.val_every_n_steps=16"
run(f"{digits} run.name=first", folder=folder)

# %% [markdown]
# The first line says how the run is laid out. Everything else is in one folder:

# %%
first = folder / "outputs" / "first"
for path in sorted(first.iterdir()):
    print(path.name + "/" * path.is_dir())

# %% [markdown]
# `metrics.csv` has a row per optimizer step; validation adds its values to the row of its step.

# %%
print((first / "metrics.csv").read_text()[:500])

# %%
curves({"first": first}, "train/loss")

# %%
curves({"first": first}, "val/accuracy")

# %% [markdown]
# The same curves, the configuration with all that differs from the defaults, images with
# predictions, speed and memory are in `report.html`: open it in a browser.
# `scripts/runs.py compare` puts runs side by side. A second run, with another learning rate:

# %%
run(f"{digits} optimizer.lr=2e-3 run.name=slower", folder=folder)

# %%
run("python scripts/runs.py compare outputs/first outputs/slower", folder=folder, last=30)
curves({name: folder / "outputs" / name for name in ("first", "slower")}, "val/accuracy")

# %%
best = {
    name: max(history.read(folder / "outputs" / name).curve("val/accuracy")[1])
    for name in ("first", "slower")
}
assert best["first"] > 0.9, best
best

# %% [markdown]
# ## A mistake costs seconds
# All problems of a command are listed before anything starts, with the nearest names.

# %%
run("python train.py experiment=digits trainer.max_epoch=8 optimizer=moun", folder=folder, expect=2)
