"""The doctor: checks of the machine, the launch, the links, one real step and the run directory,
each with a remedy.
"""
