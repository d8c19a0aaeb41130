"""What to type after errors of torch's about sharded weights, by words of its message."""

from armature.parallel import sharded

WHOLE = "within `with armature.whole_weights(self):` weights are ordinary tensors"
FEWER = (
    "type a larger strategy.min_num_params, below which weights stay whole on every rank, or "
    "strategy=ddp."
)
REMEDIES = {
    sharded.MIXED:
        "A sharded weight was used outside of the forward of its block or large layer. Call that "
        f"module; or read and change the weight in a hook: {WHOLE}. For a loss, {FEWER}",
    "Sharding propagation failed":
        f"torch cannot compute this with sharded weights or gradients. In a hook, {WHOLE}. If an "
        f"optimizer's step failed, take another one; or {FEWER}",
    "as_strided not supported with DTensor":
        "torch cannot reach these elements of a sharded weight (fill_diagonal_ and the like). In a "
        f"hook, {WHOLE}; or {FEWER}",
    ".numpy() is not supported for tensor subclasses":
        f"A sharded weight has no NumPy array. On all ranks, {WHOLE}; write the file on rank 0.",
    "Attempted to access the data pointer on an invalid python storage":
        "A sharded weight cannot be written to a file (safetensors, save_pretrained). On all "
        f"ranks, {WHOLE}; write the file on rank 0.",
    "FSDP does not support deepcopy":
        "A module was copied after it had been sharded. Copy it in __init__ or configure_model, or "
        f"{FEWER}",
    "Can't pickle <class 'torch.distributed.fsdp":
        "A sharded module cannot be pickled (torch.save, copy through pickle): each rank has a "
        "part of it. Call trainer.save_checkpoint on all ranks, or load the run with "
        f"armature.load; or {FEWER}",
    "storage of size 0":
        "A gradient of a gradient (create_graph=True) needs weights that FSDP frees after the "
        f"first one: {FEWER}",
    "appears to not have been used in the graph":
        "A unit's forward computes with gathered copies of its weights, of which "
        "torch.autograd.grad knows nothing. Call self.manual_backward(loss), which gives each "
        f"weight its .grad; or {FEWER}",
}  # fmt: skip
