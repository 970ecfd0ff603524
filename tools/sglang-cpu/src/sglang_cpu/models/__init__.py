"""The architectures an engine loads at start (SGLANG_EXTERNAL_MODEL_PACKAGE): SGLang itself imports some 200 files."""
