"""Hugging Face's folders, read torch-free and before launch.

`folder` reads a folder's files, `architecture` translates config.json to the decoder's arguments
and back, and `check` fills a run's configuration from a folder and refuses what does not fit. The
table of tensors' names is the model's (`models/decoder/names.py`); weights are read and written by
`checkpoint/huggingface.py`.
"""
