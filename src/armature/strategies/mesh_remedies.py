"""What to type after errors of torch's about sharded weights, by words of its message."""

from armature.parallel import dtensors

REMEDIES = {
    dtensors.MIXED:
        "A weight of a sharded model was used outside the forward of the module that holds it, "
        "where ranks "
        "have parts of it only. Compute this in that module's forward (call layers, not slices of "
        "them), or "
        "type strategy=ddp.",
    "Sharding propagation failed":
        "torch cannot compute this with sharded weights or gradients, as they are between forward "
        "and backward. "
        "Move it into the model's forward, take another optimizer if its step failed, or type "
        "strategy=ddp.",
    "as_strided not supported with DTensor":
        "torch cannot reach these elements of a sharded weight or gradient (fill_diagonal_ and the "
        "like). Assign them: "
        "i = torch.arange(n); weight[i, i] = 0; or type strategy=ddp.",
    "FSDP does not support deepcopy":
        "A module was copied after it had been sharded. Copy it in __init__ or configure_model, or "
        "type "
        "strategy=ddp.",
    "Can't pickle <class 'torch.distributed.fsdp":
        "A sharded module cannot be pickled (torch.save, copy through pickle): each rank has a "
        "part of it. Call "
        "trainer.save_checkpoint on all ranks, load the run with armature.load, or type "
        "strategy=ddp.",
    "storage of size 0":
        "A gradient of a gradient (create_graph=True) needs weights that FSDP frees after the "
        "first one. Type "
        "strategy=ddp.",
    "appears to not have been used in the graph":
        "A forward computes with gathered copies of sharded weights, of which torch.autograd.grad "
        "knows nothing. "
        "Call self.manual_backward(loss), which gives each weight its .grad, or type "
        "strategy=single "
        "trainer.devices=1.",
}  # fmt: skip
