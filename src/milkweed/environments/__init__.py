"""Environments: how a task is sampled and scored. Conversations, tools, verifiers, reward workers, code execution."""

from milkweed.environments.classes import as_environment, from_gym, tool_use
from milkweed.environments.conversation import Conversation, LimitReached, Limits, Reply
from milkweed.environments.execution import CodeLimits, Run, code_tests, run_python
from milkweed.environments.expert import Expert
from milkweed.environments.extract import answer_in, last_box
from milkweed.environments.maths import math_equal, mathematical
from milkweed.environments.reward import Reward, Score, Scorer, current, install, score, use
from milkweed.environments.session import python_tool, shell_tool
from milkweed.environments.single_turn import single_turn
from milkweed.environments.threads import Threads
from milkweed.environments.tool_calls import ToolCall
from milkweed.environments.tools import Tool, tool
from milkweed.environments.verifiers import by_answer, exact, multiple_choice, numeric, reasoning_gym_score

__all__ = [
    "CodeLimits",
    "Conversation",
    "Expert",
    "LimitReached",
    "Limits",
    "Reply",
    "Reward",
    "Run",
    "Score",
    "Scorer",
    "Threads",
    "Tool",
    "ToolCall",
    "answer_in",
    "as_environment",
    "by_answer",
    "code_tests",
    "current",
    "exact",
    "from_gym",
    "install",
    "last_box",
    "math_equal",
    "mathematical",
    "multiple_choice",
    "numeric",
    "python_tool",
    "reasoning_gym_score",
    "run_python",
    "score",
    "shell_tool",
    "single_turn",
    "tool",
    "tool_use",
    "use",
]
