"""Checkpoints that any layout writes and any other layout reads.

`directory` owns the names on disk, `storage` reads files safely, `state` names tensors
as in the unsharded model, `writer` writes in the foreground or in a thread, `resume` chooses the
checkpoint before processes start, and `convert` exchanges weights with safetensors.

A save, on all ranks:

1. `training.checkpointing.Checkpointing` decides that one is due, after an optimizer step or a
   validation. It writes pending rows of metrics.csv, waits for the previous save and calls
   `trainer.save_checkpoint(path, storage_options=writer)`.
2. Lightning collects loops, callbacks, schedulers and the data module's position. Each rank's part
   of weights and optimizer state comes from the strategy (`strategies.checkpoints`), which adds the
   tensors of callbacks and every rank's random state, and calls `writer.save`.
3. `writer.CheckpointWriter` creates `step=NNNNNN.part` with meta.pt, and each rank writes its
   tensors and computes their checksums. With `background` only the copy into the CPU's memory
   happens here; a thread does the rest.
4. Rank 0 writes manifest.json, which describes all files, and renames the directory, which is no
   checkpoint before.
5. Rank 0 calls `Checkpointing._saved`: `last` names the checkpoint, and older ones are pruned.

A crash between any two of these leaves the earlier checkpoints and `last` as they were, or a
complete checkpoint that `last` does not name yet. The next start removes the leftovers.

A resume:

1. The parent calls `resume.problems` and `resume.checkpoint_for` (through `run_dir.write`), which
   judge by names and sizes only. The first complete checkpoint counts: the one that `last` names,
   then from newest to oldest.
2. Each rank's worker calls `storage.first_intact`, which compares checksums, each rank those of a
   share of the files. A checkpoint of weights only becomes `strategy.initial_weights`; any other is
   `trainer.fit`'s `ckpt_path`.
3. The strategy builds the model, and Lightning calls its `load_checkpoint`: rank 0 reads the index
   of tensors for all, `state` reads weights in place, and the rank's random state is held. Weights
   then pass through the module's `load_state_dict`. Callbacks and the data module load their state.
   Then comes `on_fit_start`, in which callbacks register their tensors.
4. Weights of modules that `on_fit_start` has made are loaded. Lightning restores optimizers, whose
   state is made from the checkpoint, callbacks' tensors, loops and schedulers. `training` sets the
   counters of its loops from the optimizer steps and samples that the checkpoint has seen, whatever
   the layout was.
5. Before the first batch, rows of metrics.csv after the checkpoint are dropped, and
   `Checkpointing.begin` removes leftovers and runs a validation that was due at the checkpoint's
   step.
6. At the start of the first epoch the held random state is restored, so that training draws what it
would have drawn.
"""
