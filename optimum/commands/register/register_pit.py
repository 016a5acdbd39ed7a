"""`optimum-cli export pit`: the command `pit-deploy export` where users of optimum look for it.

optimum finds this file in the namespace `optimum.commands.register`; there must be no `__init__.py` beside it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

_CHOICES = {"--to": ("onnx", "executorch", "coreml", "hf"), "--logits": ("last", "all")}
_TEXTS = ("--to", "--weights", "--tables", "--layout", "--logits", "--profile", "--quantizer", "--golden")
_NUMBERS = {
    "--context": int,
    "--block-size": int,
    "--max-kl": float,
    "--max-bytes": int,
    "--calibration": Path,
}
_HELP = {
    "--to": "Target; onnx by default.",
    "--weights": "Of the backbone: fp32, fp16, int8, int4.",
    "--tables": "Of embedding and head: fp32, fp16, int8, int4.",
    "--layout": "shared or untied.",
    "--logits": "Last position or all.",
    "--profile": "A form of the target's artifact.",
    "--quantizer": "rtn or feedback.",
    "--golden": "PIT checkpoint to record from, when the source is folded.",
    "--context": "Tokens that the cache holds.",
    "--block-size": "Weights that share a scale.",
    "--max-kl": "Search the smallest artifact inside this mean KL.",
    "--max-bytes": "Search the best artifact of this many bytes.",
    "--calibration": "Text that stands for the model's use.",
}


class PitExportCommand(BaseOptimumCLICommand):
    """Parses, calls `pit_deploy.export` with the same names, prints."""

    COMMAND = CommandInfo(name="pit", help="Export a PIT, folded or plain checkpoint with pit-deploy.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("source", metavar="SRC", help="PIT, folded or plain checkpoint.")
        parser.add_argument("out", metavar="OUT", help="Folder to write.")
        for name in _TEXTS:
            parser.add_argument(name, choices=_CHOICES.get(name), help=_HELP[name])
        for name, kind in _NUMBERS.items():
            parser.add_argument(name, type=kind, help=_HELP[name])
        parser.add_argument("--overwrite", action="store_true", help="Replace OUT if it exists.")

    def run(self) -> None:
        """Export; a failure is one sentence on standard error and exit status 2, as with `pit-deploy`."""
        from pit_deploy.console import print_export
        from pit_deploy.errors import PitDeployError
        from pit_deploy.exporting import export

        names = [name.removeprefix("--").replace("-", "_") for name in (*_TEXTS, *_NUMBERS)]
        given: dict[str, Any] = {name: getattr(self.args, name) for name in names}
        options = {name: value for name, value in given.items() if value is not None}
        try:
            report = export(self.args.source, self.args.out, overwrite=self.args.overwrite, **options)
        except PitDeployError as error:
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        print_export(report)


REGISTER_COMMANDS = [(PitExportCommand, ExportCommand)]
