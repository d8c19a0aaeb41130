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
# # 3. One model under every strategy
#
# A tiny decoder, twelve steps in fp32, in processes on the CPU: the losses must agree. Then what a
# rank of a real size would hold and send on GPUs, by the planner's formulas.

# %%
from tools import curves, fresh, furthest, losses, run

folder = fresh("3")
layouts = {
    "single": "strategy=single",
    "ddp": "strategy=ddp trainer.devices=2",
    "fsdp": "strategy=fsdp strategy.min_num_params=0 trainer.devices=2",
    "tensor": "strategy=tensor trainer.devices=2",
    "pipeline": "strategy=pipeline trainer.devices=2",
}

# %%
for name, typed in layouts.items():
    command = f"python train.py experiment=parity logger=none run.name={name} {typed}"
    run(command, folder=folder, last=1)

# %% [markdown]
# ## The curves coincide
# The first is drawn widest, so that all are seen.

# %%
runs = {name: folder / "outputs" / name for name in layouts}
curves(runs, "train/loss", nested=True)

# %%
far = {name: furthest(losses(runs["single"]), losses(path)) for name, path in runs.items()}
assert max(far.values()) < 1e-5, far
{name: f"{value:.1e}" for name, value in far.items()}

# %% [markdown]
# ## What each sends
# Rank 0's collectives in one optimizer step on GPUs, by the simulator: bytes of the tensor that is
# reduced, gathered or sent. `ddp` reduces all gradients once. `fsdp` gathers the weights and
# scatters the reduced
# gradients, here for each of its two micro-batches (by default it shards nothing as small as this
# model). `tensor` reduces activations, and `pipeline`
# sends them to the next stage. What is left are a few numbers, such as the norm of the gradients.

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
        before = by_kind.get(sent.kind, (0, 0))
        by_kind[sent.kind] = (before[0] + int(sent.calls), before[1] + int(sent.bytes))
    rows = [[name, kind, f"{calls:,}", f"{size:,}"] for kind, (calls, size) in by_kind.items()]
    table += rows or [[name, "none", "", ""]]
print("\n".join(columns.aligned(table)))
assert {row[1] for row in table if row[0] == "fsdp"} >= {"all_gather", "reduce_scatter"}

# %% [markdown]
# ## On GPUs
# What sharding saves there: Llama 3 8B on eight H100s, by formulas, without a GPU. The rows are
# ways to lay the run out; the columns say what fits, the memory per rank, and what limits the step.

# %%
run(
    "python scripts/plan.py model=llama3_8b data=synthetic data.context=4096 trainer.devices=8 "
    "hardware=h100_80gb",
    folder=folder,
    last=25,
)
