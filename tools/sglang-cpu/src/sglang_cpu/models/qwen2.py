"""SGLang's own qwen2, by itself."""

from sglang.srt.models.qwen2 import EntryClass  # noqa: F401  (SGLang looks for this name)
