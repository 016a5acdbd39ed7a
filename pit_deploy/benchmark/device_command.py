"""`bench --device`: what the command does besides reading its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pit_deploy.benchmark.app import bench_app
from pit_deploy.benchmark.console import print_bench
from pit_deploy.benchmark.devices import bench_devices
from pit_deploy.command_line import bars, emit
from pit_deploy.errors import InputError, PitDeployError


def bench_device(
    bundles: list[Path],
    device: str,
    cool_down: float,
    measured: dict[str, Any] | None,
    json: str | None,
    plot: Path | None,
) -> None:
    """`bench` on devices, by the app where `measured` is None, which has settings of its own.

    One device gives a report, all of them a list with a report or an error for each.
    """
    with bars(json) as progress:
        if measured is None:
            if len(bundles) != 1:
                raise InputError("--app measures one bundle at a time; give one.")
            results = bench_app(bundles[0], device, cool_seconds=cool_down, progress=progress)
        else:
            results = bench_devices(bundles, device, cool_seconds=cool_down, progress=progress, **measured)
    reports = [result.report for result in results if result.report is not None]
    if plot is not None and reports:
        from pit_deploy.benchmark.plot import plot as draw

        draw(reports[0], plot)
    several = {"devices": [result.to_dict() for result in results]}
    one = reports[0].to_dict() if reports and device != "all" else None
    if not emit(json, one or several):
        for report in reports:
            print_bench(report)
    failed = [f"{result.serial}: {result.error}" for result in results if result.error is not None]
    if failed:
        raise PitDeployError(" ".join(failed))
