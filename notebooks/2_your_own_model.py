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
# # 2. Your own model, data and experiment
#
# `src/example/` is a complete example: model, plan, data and task. You copy it with its
# configurations and edit the copy. This notebook does so in a copy of the template, so that your
# clone stays as it is.

# %%
import shutil
import subprocess

from tools import ROOT, curves, fresh, furthest, losses, run

clone = fresh("2")
for name in ("configs", "src"):
    shutil.copytree(
        ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
shutil.copy(ROOT / "train.py", clone)

# %% [markdown]
# What `make new NAME=mine` does, by hand (it writes a test as well):

# %%
copying = r"""
cp -r src/example src/mine
for group in model data task experiment; do
    cp configs/$group/example.yaml configs/$group/mine.yaml
done
perl -pi -e 's/example/mine/g' src/mine/*.py configs/*/mine.yaml
"""
subprocess.run(["bash", "-euc", copying], cwd=clone, check=True)
print((clone / "configs" / "experiment" / "mine.yaml").read_text())

# %% [markdown]
# ## Data: a map-style Dataset
# Two spirals in place of two half moons. The base class shuffles, batches, shares samples among
# processes and remembers the position to resume from.

# %%
data = (clone / "src" / "mine" / "data.py").read_text()
spirals = """angle = 3.0 * math.pi * torch.rand(samples, generator=generator).sqrt()
        side = torch.where(self.targets == 0, 1.0, -1.0)
        x, y = side * angle * angle.cos(), side * angle * angle.sin()
        points = torch.stack([x, y], dim=1) / (3.0 * math.pi)
        self.inputs = points + 0.2 * noise * torch.randn(samples, 2, generator=generator)
"""
begin, end = data.index("angle = math.pi"), data.index("    def __len__")
(clone / "src" / "mine" / "data.py").write_text(data[:begin] + spirals + "\n" + data[end:])

# %% [markdown]
# ## Model: a plain `nn.Module`
# It stays as it is. Its heart:

# %%
model = (clone / "src" / "mine" / "model.py").read_text()
print(model[model.index("    def forward") :].split("\n\n")[0])

# %% [markdown]
# ## Experiment: what differs from the defaults
# Spirals need more steps and a wider model than moons.

# %%
experiment = clone / "configs" / "experiment" / "mine.yaml"
experiment.write_text(
    experiment.read_text()
    .replace("max_epochs: 4", "max_epochs: 16")
    .replace("lr: 1.0e-3", "lr: 3.0e-3")
    + "model:\n  width: 64\n"
)
mine = "python train.py experiment=mine trainer.precision=32-true logger=none"
run(f"{mine} run.name=single", folder=clone)

# %% [markdown]
# ## Three strategies, one result
# The same command with `strategy=`. The model code knows nothing of it. Losses are equal up to
# rounding. Rounding grows with each step: with a loss near 0, single spikes of a curve differ.

# %%
run(f"{mine} run.name=ddp strategy=ddp trainer.devices=2", folder=clone, last=4)
run(f"{mine} run.name=tensor strategy=tensor trainer.devices=2", folder=clone, last=4)

# %%
runs = {name: clone / "outputs" / name for name in ("single", "ddp", "tensor")}
curves(runs, "train/loss", nested=True)

# %%
# later, rounding grows: with the learning rate, and as the loss falls
first = losses(runs["single"])[:10]
far = {name: furthest(first, losses(path)[:10]) for name, path in runs.items()}
assert max(far.values()) < 1e-4, far
{name: f"{value:.1e}" for name, value in far.items()}
