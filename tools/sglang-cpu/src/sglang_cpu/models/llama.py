"""SGLang's own llama, by itself."""

from sglang.srt.models.llama import EntryClass  # noqa: F401  (SGLang looks for this name)
