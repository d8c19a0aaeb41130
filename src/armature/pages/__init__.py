"""What a run looks like: its files read, curves as SVG, report.html, runs side by side. Torch-free.

Nothing here changes a run, and every text that comes from a run is escaped.
"""
