"""Armature: one LightningModule, any parallelism, one word to change."""

from armature import config

__version__ = "0.1.0"

config.register()  # Hydra's compose("train") then works in a notebook
