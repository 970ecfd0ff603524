"""SGLang's own qwen3_moe, by itself."""

from sglang.srt.models.qwen3_moe import EntryClass  # noqa: F401  (SGLang looks for this name)
