"""Callbacks that a user chooses, one per config in `configs/callbacks/`: `ema`, `monitors` and
`stop_at`.

Add one with `+callbacks.ema._target_=armature.callbacks.ema.EMA`, and its arguments with
`+callbacks.ema.decay=0.99`. A class of your own is added the same way, by its import path. The
callbacks that every run needs (step log, checkpoints, stop, display) are in `armature.training`.
"""
