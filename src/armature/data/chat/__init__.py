"""Conversations to learn from: read, written by the tokenizer's chat template, packed into rows."""
