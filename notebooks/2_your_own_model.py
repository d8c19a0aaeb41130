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
# # 2. Your own model under every strategy
#
# You copy the example, give it data and sizes of your own, and train it under five strategies: the
# losses are the same. Then you see what each strategy sends, and what a model of a real size takes.

# %%
import shutil
import subprocess

from tools import ROOT, curves, fresh, furthest, losses, run

clone = fresh("2")  # a copy of the template, so that yours stays as it is
for name in ("configs", "src"):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "mine", "mine.yaml")
    shutil.copytree(ROOT / name, clone / name, ignore=ignored)
_ = shutil.copy(ROOT / "train.py", clone)

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
_ = subprocess.run(["bash", "-euc", copying], cwd=clone, check=True)

# %% [markdown]
# ## Data: a map-style Dataset
# Two spirals in place of two half moons. The base class shuffles, batches, shares samples among
# processes and remembers the position to resume from.

# %%
data = clone / "src" / "mine" / "data.py"
spirals = """angle = 3.0 * math.pi * torch.rand(samples, generator=generator).sqrt()
        side = torch.where(self.targets == 0, 1.0, -1.0)
        x, y = side * angle * angle.cos(), side * angle * angle.sin()
        points = torch.stack([x, y], dim=1) / (3.0 * math.pi)
        self.inputs = points + 0.2 * noise * torch.randn(samples, 2, generator=generator)
"""
code = data.read_text()
begin, end = code.index("angle = math.pi"), code.index("    def __len__")
_ = data.write_text(code[:begin] + spirals + "\n" + code[end:])

# %% [markdown]
# ## Model: a plain `nn.Module`
# The example's stays as it is. Its plan, beside it, says as data how it may be sharded:

# %%
plan = (clone / "src" / "mine" / "plan.py").read_text()
print(plan[plan.index("PLAN") :])

# %% [markdown]
# ## Experiment: what differs from the defaults
# Spirals need more steps and a wider model than moons.

# %%
experiment = clone / "configs" / "experiment" / "mine.yaml"
text = experiment.read_text().replace("max_epochs: 4", "max_epochs: 8")
experiment.write_text(text.replace("lr: 1.0e-3", "lr: 3.0e-3") + "model:\n  width: 64\n")
print(experiment.read_text())

# %%
mine = "python train.py experiment=mine trainer.precision=32-true logger=none"
run(f"{mine} run.name=single", folder=clone)

# %% [markdown]
# ## Five strategies, one result
# The same command with another `strategy=`, for one epoch. The code knows nothing of it, and the
# losses are equal up to rounding. The first curve is drawn widest, so that all are seen.

# %%
layouts = {
    "single": "strategy=single",
    "ddp": "strategy=ddp trainer.devices=2",
    "fsdp": "strategy=fsdp strategy.min_num_params=0 trainer.devices=2",
    "tensor": "strategy=tensor trainer.devices=2",
    "pipeline": "strategy=pipeline trainer.devices=2",
}
one = f"{mine} trainer.max_epochs=1"
for name, typed in layouts.items():
    run(f"{one} run.name=one_{name} {typed}", folder=clone, last=1)

# %%
runs = {name: clone / "outputs" / f"one_{name}" for name in layouts}
curves(runs, "train/loss", nested=True)

# %%
far = {name: furthest(losses(runs["single"]), losses(path)) for name, path in runs.items()}
assert max(far.values()) < 1e-5, far
{name: f"{value:.1e}" for name, value in far.items()}

# %% [markdown]
# ## What each sends
# Rank 0's collectives in one optimizer step of a tiny decoder on GPUs, by the simulator: bytes of
# the tensor that is reduced, gathered or sent. `ddp` reduces all gradients once. `fsdp` gathers
# weights and scatters the reduced gradients. `tensor` reduces activations, and `pipeline` sends
# them to the next stage.

# %%
from armature import cli
from armature.pages import columns
from armature.planning import devices, simulation

configs = [cli.compose(["experiment=parity", *typed.split()]) for typed in layouts.values()]
device = devices.named("h100_80gb")
requests = [simulation.Request(cfg=cfg, rank=0, device=device) for cfg in configs]
steps = simulation.simulate_all(requests)
table = [["strategy", "collective", "calls", "bytes"]]
for name, step in zip(layouts, steps, strict=True):
    by_kind = {}
    for sent in step.volumes:
        calls, size = by_kind.get(sent.kind, (0, 0))
        by_kind[sent.kind] = (calls + int(sent.calls), size + int(sent.bytes))
    rows = [[name, kind, f"{calls:,}", f"{size:,}"] for kind, (calls, size) in by_kind.items()]
    table += rows or [[name, "none", "", ""]]
print("\n".join(columns.aligned(table)))
assert {row[1] for row in table if row[0] == "fsdp"} >= {"all_gather", "reduce_scatter"}

# %% [markdown]
# ## On GPUs
# What sharding saves there: Llama 3 8B on eight H100s, by formulas (without `--quick` the best are
# simulated, which takes a minute). The rows are ways to lay the run out. The columns say what fits,
# the memory per rank, and what limits the step.

# %%
run(
    "python scripts/plan.py model=llama3_8b data=synthetic data.context=4096 trainer.devices=8 "
    "hardware=h100_80gb --quick",
    folder=ROOT,
    last=25,
)
