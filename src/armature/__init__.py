"""Armature: one LightningModule, any parallelism, one word to change."""

__version__ = "0.1.0"
