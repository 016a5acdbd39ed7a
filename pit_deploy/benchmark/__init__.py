"""Benchmarks: speed, memory and size of bundles, alone or against other programs in the same run."""

from __future__ import annotations

from pit_deploy.benchmark.report import BenchReport
from pit_deploy.benchmark.suite import bench

__all__ = ["BenchReport", "bench"]
