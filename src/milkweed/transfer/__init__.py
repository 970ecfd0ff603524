"""The transfer plane: weights (and KV) from process to process over NIXL."""
