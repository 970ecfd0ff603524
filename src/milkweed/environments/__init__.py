"""Environments: how a task is sampled and scored. Verifiers, reward workers, code execution."""

from milkweed.environments.execution import CodeLimits, Run, code_tests, run_python
from milkweed.environments.extract import answer_in, last_box
from milkweed.environments.maths import math_equal, mathematical
from milkweed.environments.reward import Reward, Score, Scorer, current, install, score, use
from milkweed.environments.single_turn import single_turn
from milkweed.environments.verifiers import by_answer, exact, multiple_choice, numeric, reasoning_gym_score

__all__ = [
    "CodeLimits",
    "Reward",
    "Run",
    "Score",
    "Scorer",
    "answer_in",
    "by_answer",
    "code_tests",
    "current",
    "exact",
    "install",
    "last_box",
    "math_equal",
    "mathematical",
    "multiple_choice",
    "numeric",
    "reasoning_gym_score",
    "run_python",
    "score",
    "single_turn",
    "use",
]
