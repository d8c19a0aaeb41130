"""What the server of ranks imports before it forks them: otherwise each rank of each fit would
import it again.
"""

import contextlib
import gc
import importlib
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it as it is imported
MODULES = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "torchmetrics",
    "armature.worker",
    "armature.callbacks.ema",
    "armature.models.decoder.model",
    "armature.models.mixture.model",
    "armature.models.vit.model",
    "armature.optim.muon",
    "armature.strategies.ddp",
    "armature.strategies.mesh",
    "armature.strategies.single",
    "armature.tasks.base",
)
DEEPSPEED = (
    "armature.strategies.deepspeed",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
)
with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's logger keeps the stream that it finds
    for name in MODULES:
        importlib.import_module(name)
    with contextlib.suppress(ModuleNotFoundError):  # where DeepSpeed is not installed
        for name in DEEPSPEED:
            importlib.import_module(name)
gc.freeze()  # what is imported is not garbage of any rank
