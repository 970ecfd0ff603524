"""Rollout: SGLang engines as replicas, behind one router."""

from milkweed.rollout.protocol import CommitReport, EngineSpec, EngineStats, SampleError
from milkweed.rollout.records import UpdateReport
from milkweed.rollout.router import Router
from milkweed.rollout.teacher import Teacher

__all__ = ["CommitReport", "EngineSpec", "EngineStats", "Router", "SampleError", "Teacher", "UpdateReport"]
