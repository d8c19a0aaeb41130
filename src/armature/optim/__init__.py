"""Optimizers, their parameter groups and their schedules."""
