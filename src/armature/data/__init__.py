"""Data modules, the global-order sampler, and the text corpus.

Import from the modules: this file loads nothing.
"""
