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
# # 4. Kill it, resume it
#
# A run that is killed with SIGKILL twice ends with the same numbers as one that was not, bit for
# bit.

# %%
import gzip

from tools import curves, fresh, run

folder = fresh("4")

# %% [markdown]
# ## The data
# Text in gzip files: here Python's own sources. They are tokenized once, and may exceed memory.

# %%
import sysconfig
from pathlib import Path

shards = folder / "shards"
shards.mkdir()
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
for i in range(6):
    with gzip.open(shards / f"{i}.txt.gz", "wt", encoding="utf-8") as file:
        for path in sources[i::6]:
            file.write(path.read_text(encoding="utf-8", errors="replace"))
sorted(path.name for path in shards.iterdir())

# %%
common = (
    "python train.py experiment=parity trainer.max_steps=30 data=text data.path=shards "
    "data.context=64 data.global_batch_size=32 data.micro_batch_size=8 data.source.cache_dir=cache "
    "logger=none checkpoint.every_n_steps=5 task.preview_tokens=0"
)
run(f"{common} run.name=straight", folder=folder)

# %% [markdown]
# ## Killed twice
# The callback sends the process SIGKILL, once per step that it names. SIGKILL cannot be caught:
# nothing is saved at that moment. The same command resumes from the last complete checkpoint.

# %%
stop_at = "_target_:armature.callbacks.stop_at.StopAt"
stops = " ".join(
    f"'+callbacks.stop_{step}={{{stop_at},signals:{{SIGKILL:{step}}}}}'" for step in (8, 19)
)
killed = f"{common} run.name=killed {stops}"
run(killed, folder=folder, expect=None, last=3)

# %%
run(killed, folder=folder, expect=None, last=3)

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
# A checkpoint belongs to the model, not to the layout: two ranks under `fsdp` continue what one
# process began.

# %%
longer = common.replace("max_steps=30", "max_steps=36")
run(f"{longer} run.name=killed strategy=fsdp trainer.devices=2", folder=folder)
