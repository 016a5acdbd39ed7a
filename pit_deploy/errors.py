"""Every error a user can meet: one sentence, an exit status, and where it helps the numbers as attributes."""

from __future__ import annotations

from pathlib import Path


class PitDeployError(Exception):
    """Base of all errors that the command line prints as one sentence without a traceback."""

    exit_code = 2


class InputError(PitDeployError):
    """Something the user gave cannot be used; the message names it and says what to do next."""


class OutputExistsError(InputError):
    """The output path is taken."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} exists already; choose another path or pass --overwrite to replace it.")
        self.path = path


class MissingExtraError(PitDeployError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"This needs the package '{package}', which is not installed; run: pip install 'pit-deploy[{extra}]'"
        )
        self.package, self.extra = package, extra


class ContextFullError(PitDeployError):
    """More tokens were asked for than the cache of the artifact can hold. Raised before anything runs."""

    def __init__(self, used: int, needed: int, context_length: int) -> None:
        super().__init__(
            f"The context is full: {used} tokens are in the cache and {needed} more were asked for, "
            f"but the artifact holds {context_length}; shorten the prompt, start anew, or export with a "
            f"larger --context."
        )
        self.used, self.needed, self.context_length = used, needed, context_length


class RuntimeDiedError(PitDeployError):
    """The process of a runtime ended, or was ended because it did not answer."""

    exit_code = 1

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ParityError(PitDeployError):
    """A check ran and its result is out of tolerance."""

    exit_code = 1
