"""Models and adapters in Hugging Face's forms: what their folders hold, read torch-free and before launch.

`folder` reads a folder's files, `architecture` translates config.json and `names` the tensors' names to the decoder's
and back, `check` fills a run's configuration from a folder and refuses what does not fit. Weights are read and written
by `armature.checkpoint.huggingface`.
"""
