"""SGLang's own qwen3, by itself."""

from sglang.srt.models.qwen3 import EntryClass  # noqa: F401  (SGLang looks for this name)
