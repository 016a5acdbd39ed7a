"""What the browser runtimes need beside Python: Node, three packages of pinned versions, and Chromium.

`python -m pit_deploy.runtimes.browser_tools` (`make setup-browser` in a checkout) installs the packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.files import atomic_output
from pit_deploy.json_files import read_json
from pit_deploy.sample import cache_folder

SCRIPTS = Path(__file__).parent / "web"
"""The JavaScript of this package, with the list of packages that it needs."""
CARRIED = ("package.json", "package-lock.json", ".npmrc")
OLDEST_NODE = 20
SETUP = "make setup-browser (or: python -m pit_deploy.runtimes.browser_tools)"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MAC_BROWSER = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def node() -> str:
    """The Node program. Raises `InputError` where there is none, or an old one."""
    found = shutil.which("node")
    if found is None:
        raise InputError(
            f"The browser runtimes need Node {OLDEST_NODE} or later and there is no `node`; install it (Debian: "
            f"apt-get install nodejs npm), then {SETUP}."
        )
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    major = said.removeprefix("v").split(".")[0]
    if not major.isdigit() or int(major) < OLDEST_NODE:
        raise InputError(
            f"{found} is version {said or '?'}; the browser runtimes need {OLDEST_NODE} or later."
        )
    return found


def modules_folder() -> Path:
    """Where the packages are: PIT_DEPLOY_BROWSER, else build/browser of a checkout, else the cache folder."""
    named = os.environ.get("PIT_DEPLOY_BROWSER")
    if named:
        return Path(named)
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "build" / "browser"
    return cache_folder() / "browser"


def installed_modules() -> Path:
    """The folder of the packages. Raises `InputError` where they are not installed, or in other versions."""
    folder = modules_folder()
    wanted = read_json(SCRIPTS / "package.json")["dependencies"]
    for name, version in wanted.items():
        file = folder / "node_modules" / name / "package.json"
        if not file.is_file():
            raise InputError(f"The package {name} {version} is not in {folder}; run {SETUP}.")
        found = read_json(file)["version"]
        if found != version:
            raise InputError(f"{folder} has {name} {found}, and {version} is needed; run {SETUP}.")
    return folder


def chromium() -> str:
    """The browser: PIT_DEPLOY_CHROMIUM, or the first known one. Raises `InputError` where there is none."""
    named = os.environ.get("PIT_DEPLOY_CHROMIUM")
    if named:
        if not os.access(named, os.X_OK):
            raise InputError(
                f"PIT_DEPLOY_CHROMIUM names {named}, which is no program; name the browser's program."
            )
        return named
    for name in (*_BROWSERS, _MAC_BROWSER):
        found = shutil.which(name)
        if found is not None:
            return found
    raise InputError(
        "There is no Chromium; install it (Debian: apt-get install chromium), or name one in PIT_DEPLOY_CHROMIUM."
    )


def set_up() -> Path:
    """Install the packages where they are not yet, and return their folder.

    They come from the npm registry in the versions and with the hashes of package-lock.json, and none of their
    own install scripts runs. A failed call leaves what was there. Raises `PitDeployError` with npm's words.
    """
    node()
    try:
        return installed_modules()
    except InputError:
        pass
    npm = shutil.which("npm")
    if npm is None:
        raise InputError(
            "There is no `npm`, which installs the packages; install it (Debian: apt-get install npm)."
        )
    folder = modules_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(folder, overwrite=True) as partial:
        for name in CARRIED:
            shutil.copyfile(SCRIPTS / name, partial / name)
        done = subprocess.run([npm, "ci"], cwd=partial, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            words = " ".join((done.stderr or done.stdout).split())[-400:]
            raise PitDeployError(f"npm could not install the browser packages: {words}")
    return installed_modules()


def main() -> NoReturn:
    """Install the packages and say what is there."""
    try:
        print(f"Packages are in {set_up()}.")
        print(f"The browser is {chromium()}.")
    except PitDeployError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
