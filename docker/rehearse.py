"""Runs the steps of a Dockerfile in scratch roots on this machine, where there is no Docker, then tries the result.

    python docker/rehearse.py docker/cpu.Dockerfile [--build-arg NAME=VALUE] [--wheels DIR] [--then demo]

This machine's own files stand in for the base image: each stage is an overlay over `/` whose writes go to a scratch
folder, entered by chroot. ARG, ENV, WORKDIR, USER, COPY (with .dockerignore) and RUN do what Docker does; what only
labels the image is passed over, anything else is refused. Needs root and Linux; mounts live in a mount namespace of
their own and end with the process. What it cannot show: that the base image has what this machine has.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

INSIDE = "--inside"  # with the scratch folder, once this process has its mount namespace
LABELS_ONLY = {"LABEL", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "SHELL", "CMD", "COMMENT"}
PYTHON_FOLDER = Path(os.path.realpath(sys.executable)).parent
BASE_PATH = f"{PYTHON_FOLDER}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main() -> int:
    """Enters a mount namespace, runs every stage, then the image's entry point with each command of `--then`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--wheels", type=Path, help="install from this folder and ask no package index")
    parser.add_argument("--then", action="append", metavar="COMMAND", help="given to the entry point [default: demo]")
    options = parser.parse_args()
    if options.inside is None:
        return outside()
    arguments = dict(text.split("=", 1) for text in options.build_arg)
    rehearsal = Rehearsal(options.dockerfile, options.inside, arguments, options.wheels)
    rehearsal.build()
    return max(rehearsal.enter(command.split()) for command in options.then or ["demo"])


def outside() -> int:
    """Starts this program again in a mount namespace.

    The scratch folder is removed out here, after every mount has ended with that process: nothing of this machine can
    be reached through it then.
    """
    if os.geteuid() != 0:
        sys.exit("rehearse: needs root, for chroot and overlay mounts")
    with tempfile.TemporaryDirectory(prefix="halocline-rehearsal-") as folder:
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, INSIDE, folder]
        return subprocess.run([*command, *sys.argv[1:]], check=False).returncode


@dataclass
class Stage:
    """One stage of a build.

    Attributes:
        root: Where its file system is seen.
        layers: Folders with its writes, newest first.
        environment: Variables of its processes.
    """

    root: Path
    layers: list[Path]
    environment: dict[str, str]
    folder: str = "/"
    user: tuple[int, int] = (0, 0)
    entry: list[str] = field(default_factory=list)


class Rehearsal:
    """A build of one Dockerfile."""

    def __init__(self, dockerfile: Path, scratch: Path, arguments: dict[str, str], wheels: Path | None) -> None:
        self.steps = DockerfileParser(path=str(dockerfile.resolve())).structure
        self.context = dockerfile.resolve().parent.parent
        self.ignore = read_ignore(self.context / ".dockerignore")
        self.scratch = scratch
        self.given = arguments
        self.wheels = wheels
        self.globals: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        self.stage: Stage | None = None

    def build(self) -> None:
        """Carries out every instruction and prints what each RUN took."""
        begin = time.monotonic()
        for step in self.steps:
            name, value = step["instruction"], step["value"]
            if name in LABELS_ONLY:
                continue
            if name == "FROM":
                self.from_(value)
            elif name == "ARG":
                self.arg(value)
            elif name in ("ENV", "WORKDIR", "USER", "COPY", "RUN", "ENTRYPOINT"):
                getattr(self, name.lower())(value)
            else:
                sys.exit(f"rehearse: {name} is not among the instructions that are understood")
        print(f"rehearse: all steps in {time.monotonic() - begin:.0f} s", flush=True)

    @property
    def now(self) -> Stage:
        """The stage that is being built."""
        if self.stage is None:
            sys.exit("rehearse: an instruction before the first FROM")
        return self.stage

    def expand(self, text: str) -> str:
        """Puts the values of variables in."""
        known = self.now.environment if self.stage else self.globals
        return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: known.get(match[1] or match[2], ""), text)

    # ---- instructions -------------------------------------------------------------------------------------------

    def from_(self, value: str) -> None:
        """Opens a stage over an earlier one, or over this machine in place of a base image."""
        words = re.sub(r"\$\{(\w+)\}", lambda match: self.globals[match[1]], value).split()
        layer, root = self.scratch / f"layer-{len(self.stages)}", self.scratch / f"root-{len(self.stages)}"
        work = self.scratch / f"work-{len(self.stages)}"
        for folder in (layer, root, work):
            folder.mkdir()
        below = self.stages.get(words[0])
        lower = [str(path) for path in (below.layers if below else [])] + ["/"]
        mount("-t", "overlay", "-o", f"lowerdir={':'.join(lower)},upperdir={layer},workdir={work}", "overlay", root)
        for name in ("proc", "dev", "sys"):
            mount("--rbind", f"/{name}", root / name)
        environment = dict(below.environment) if below else base_environment()
        self.stage = Stage(root=root, layers=[layer, *(below.layers if below else [])], environment=environment)
        if below is None:
            lend_python(root)
        if self.wheels is not None:
            (root / "wheelhouse").mkdir()
            mount("--bind", self.wheels.resolve(), root / "wheelhouse")
        self.stages[words[2] if len(words) > 2 else str(len(self.stages))] = self.stage
        print(f"rehearse: FROM {value}: this machine stands in for the base", flush=True)

    def arg(self, value: str) -> None:
        """Takes an argument from the command line, from above the first stage, or its default."""
        name, _, default = value.partition("=")
        found = self.given.get(name, self.globals.get(name, default))
        if self.stage is None:
            self.globals[name] = found
        else:
            self.stage.environment[name] = found

    def env(self, value: str) -> None:
        """Sets variables for what follows."""
        for name, text in re.findall(r'(\w+)=("[^"]*"|\S+)', value):
            self.now.environment[name] = self.expand(text.strip('"'))

    def workdir(self, value: str) -> None:
        """Makes a folder and goes there."""
        self.now.folder = self.expand(value)
        self.inside(self.now.folder).mkdir(parents=True, exist_ok=True)

    def user(self, value: str) -> None:
        """Runs what follows as this user."""
        uid, _, gid = value.partition(":")
        self.now.user = (int(uid), int(gid))

    def copy(self, value: str) -> None:
        """Copies from the context or from another stage; the contents of a folder, as Docker does."""
        words = self.expand(value).split()
        source = self.context
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        inside = self.inside(target)
        for name in names:
            path = source / name.strip("/")
            if path.is_dir():
                skip = self.skipped if source == self.context else None
                shutil.copytree(path, inside, symlinks=True, dirs_exist_ok=True, ignore=skip)
            else:
                place = inside / path.name if target.endswith("/") or len(names) > 1 else inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)

    def entrypoint(self, value: str) -> None:
        """Remembers what the image starts."""
        self.now.entry = json.loads(value)

    def run(self, value: str) -> None:
        """Runs a line in a shell and stops the build when it fails."""
        begin = time.monotonic()
        print(f"rehearse: RUN {' '.join(value.split())[:100]}", flush=True)
        status = self.execute(["/bin/sh", "-c", value])
        if status != 0:
            sys.exit(f"rehearse: the step ended with {status}: RUN {value}")
        print(f"rehearse: {time.monotonic() - begin:.1f} s", flush=True)

    # ---- file systems and processes -----------------------------------------------------------------------------

    def inside(self, path: str) -> Path:
        """A path of the stage, seen from outside."""
        return self.now.root / os.path.join(self.now.folder, path).lstrip("/")

    def skipped(self, folder: str, names: list[str]) -> set[str]:
        """What .dockerignore keeps out of a folder of the context."""
        here = Path(folder).relative_to(self.context)
        return {name for name in names if ignored(here / name, self.ignore)}

    def enter(self, arguments: list[str]) -> int:
        """Starts the image's entry point."""
        begin = time.monotonic()
        status = self.execute([*self.now.entry, *arguments])
        print(f"rehearse: {' '.join(arguments)} ended with {status} after {time.monotonic() - begin:.0f} s", flush=True)
        return status

    def execute(self, command: list[str]) -> int:
        """Runs a command in the stage, as its user."""
        stage = self.now

        def enter() -> None:
            os.chroot(stage.root)
            os.chdir(stage.folder)
            os.setgroups([])
            os.setgid(stage.user[1])
            os.setuid(stage.user[0])

        environment = dict(stage.environment)
        if self.wheels is not None:
            environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheelhouse", "PIP_NO_COMPILE": "1"}
        shell = ["/bin/sh", "-c", 'exec "$0" "$@"', *command]  # the program is looked up inside, not out here
        return subprocess.run(shell, env=environment, preexec_fn=enter, check=False).returncode


def mount(*arguments: object) -> None:
    """Mounts, or stops here."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def base_environment() -> dict[str, str]:
    """What a base image's processes see; pip is told of this machine's index and certificates, as a builder would."""
    passed = {name: text for name, text in os.environ.items() if name.startswith(("PIP_", "SSL_CERT", "REQUESTS_CA"))}
    return {"PATH": BASE_PATH, "HOME": "/root", **passed}


def lend_python(root: Path) -> None:
    """Lets every user of the stage reach this machine's Python."""
    for parent in PYTHON_FOLDER.parents[:-1]:
        inside = root / str(parent).lstrip("/")
        inside.chmod(inside.stat().st_mode | 0o555)


# ---- .dockerignore ----------------------------------------------------------------------------------------------


def read_ignore(file: Path) -> list[str]:
    """The patterns of a .dockerignore, in order."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def ignored(path: Path, patterns: list[str]) -> bool:
    """Whether a path of the context stays out: the last pattern that matches it or a folder above it decides."""
    heres = [str(path), *(str(parent) for parent in path.parents if str(parent) != ".")]
    verdict = False
    for pattern in patterns:
        keep, bare = pattern.startswith("!"), pattern.lstrip("!").strip("/")
        names = [Path(here).name if bare.startswith("**/") else here for here in heres]
        if any(fnmatch.fnmatchcase(name, bare.removeprefix("**/")) for name in names):
            verdict = not keep
    return verdict


if __name__ == "__main__":
    sys.exit(main())
