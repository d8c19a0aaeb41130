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
# # 3. Kill and resume
#
# A run that is killed twice ends with the same numbers as one that was not, bit for bit.

# %%
from tools import curves, fresh, run

folder = fresh("3")
decoder = (
    "python train.py experiment=parity trainer.max_steps=30 logger=none checkpoint.every_n_steps=5"
)
run(f"{decoder} run.name=straight", folder=folder)

# %% [markdown]
# ## Killed twice
# The callback sends the process SIGKILL, once per step that it names. SIGKILL cannot be caught:
# nothing is saved at that moment. The same command resumes from the last complete checkpoint.

# %%
stop_at = "_target_:armature.callbacks.stop_at.StopAt"
stops = " ".join(
    f"'+callbacks.stop_{step}={{{stop_at},signals:{{SIGKILL:{step}}}}}'" for step in (8, 19)
)
killed = f"{decoder} run.name=killed {stops}"
run(killed, folder=folder, expect=None, last=1)

# %%
run(killed, folder=folder, expect=None, last=1)

# %%
run(killed, folder=folder)

# %% [markdown]
# ## Equal, bit for bit

# %%
files = [folder / "outputs" / name / "metrics.csv" for name in ("straight", "killed")]
assert files[0].read_bytes() == files[1].read_bytes()
curves({"straight": files[0].parent, "killed twice": files[1].parent}, "train/loss", nested=True)

# %% [markdown]
# ## On another layout
# A checkpoint belongs to the model, not to the layout: two processes under `fsdp` continue what one
# began.

# %%
longer = decoder.replace("max_steps=30", "max_steps=36")
run(f"{longer} run.name=killed strategy=fsdp trainer.devices=2", folder=folder)
