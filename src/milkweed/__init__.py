"""Milkweed: reinforcement-learning post-training of language models from one Python controller."""
__version__ = "0.1.0"
