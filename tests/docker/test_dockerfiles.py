"""What every Dockerfile and compose file must have; each rule finds its planted fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from rehearse import ignored, read_ignore

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSES = sorted((ROOT / "docker").glob("compose.*.yaml"))
LABELS = ("title", "description", "licenses", "version", "revision", "base.name")
Step = tuple[str, str]


def _steps(text: str, folder: Path) -> list[Step]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    structure = DockerfileParser(path=str(folder)).structure
    return [(step["instruction"], step["value"]) for step in structure if step["instruction"] != "COMMENT"]


def _last_stage(steps: list[Step]) -> list[Step]:
    start = max(index for index, (name, _) in enumerate(steps) if name == "FROM")
    return steps[start:]


def _values(steps: list[Step], name: str) -> list[str]:
    return [value for instruction, value in steps if instruction == name]


# ---- the rules --------------------------------------------------------------------------------------------------


def bases_are_pinned_by_digest(steps: list[Step]) -> Iterator[str]:
    """No `latest`, no bare tag: the tag says what it is to a person, the digest to Docker."""
    base = dict(value.partition("=")[::2] for value in _values(steps, "ARG")).get("BASE", "")
    if not re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) or ":latest" in base:
        yield f"base {base!r}"
    named = {words[2] for value in _values(steps, "FROM") if len(words := value.split()) == 3}
    for value in _values(steps, "FROM"):
        if value.split()[0] not in {"${BASE}", *named}:
            yield f"FROM {value}"


def copy_sources_exist(steps: list[Step]) -> Iterator[str]:
    """Everything that is copied from the repository is there and in the build context."""
    patterns = read_ignore(ROOT / ".dockerignore")
    for value in _values(steps, "COPY"):
        words = value.split()
        if words[0].startswith("--from="):
            if words[0].removeprefix("--from=") not in " ".join(_values(steps, "FROM")).split():
                yield f"COPY {value}: no such stage"
            continue
        for name in words[:-1]:
            if name != "." and (not (ROOT / name).exists() or ignored(Path(name.strip("/")), patterns)):
                yield f"COPY {value}: {name}"


def runs_as_a_number(steps: list[Step]) -> Iterator[str]:
    """Kubernetes can tell that a number is not root; a name it cannot."""
    users = _values(_last_stage(steps), "USER")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield f"USER {users}"


def checks_itself_last(steps: list[Step]) -> Iterator[str]:
    """The last thing that a build does, as the image's own user, is to check what it installed."""
    last = _last_stage(steps)
    runs = [index for index, (name, _) in enumerate(last) if name == "RUN"]
    user = max((index for index, (name, _) in enumerate(last) if name == "USER"), default=len(last))
    if not runs or runs[-1] < user or "halocline doctor --image --constraints /opt/halocline/" not in last[runs[-1]][1]:
        yield "the last RUN is no check"


def answers_and_stops(steps: list[Step]) -> Iterator[str]:
    """Health by Python in exec form, SIGTERM, and the command line as the entry point in exec form."""
    last = _last_stage(steps)
    health = " ".join(_values(last, "HEALTHCHECK"))
    command = health.partition("CMD ")[2]
    if not command.startswith("[") or json.loads(command)[0] != "python" or "--start-period=" not in health:
        yield f"HEALTHCHECK {health}"
    if _values(last, "ENTRYPOINT") != ['["halocline"]']:
        yield "ENTRYPOINT is not the command line alone"
    if _values(last, "STOPSIGNAL") != ["SIGTERM"]:
        yield "STOPSIGNAL"


def says_what_it_is(steps: list[Step]) -> Iterator[str]:
    """OCI labels."""
    text = " ".join(_values(_last_stage(steps), "LABEL"))
    yield from (label for label in LABELS if f"org.opencontainers.image.{label}=" not in text)


def caches_in_one_volume(steps: list[Step]) -> Iterator[str]:
    """Every folder that a compiler or a library writes to lies in the one volume."""
    last = _last_stage(steps)
    if _values(last, "VOLUME") != ['["/cache"]']:
        yield f"VOLUME {_values(last, 'VOLUME')}"
    text = " ".join(_values(last, "ENV"))
    for name in ("HOME", "XDG_CACHE_HOME", "HALOCLINE_CACHE_DIR", *re.findall(r"(\w+_CACHE_DIR|\w+_BASE)=", text)):
        if not re.search(rf"\b{name}=/cache(/|\s|$)", text):
            yield f"{name} is not below /cache"


def keeps_its_torch(steps: list[Step]) -> Iterator[str]:
    """A `pip install` in a derived image meets a constraint on torch."""
    if not re.search(
        r"PIP_CONSTRAINT=/opt/halocline/constraints/\w+\.txt", " ".join(_values(_last_stage(steps), "ENV"))
    ):
        yield "no PIP_CONSTRAINT in the image"


RULES = [
    bases_are_pinned_by_digest, copy_sources_exist, runs_as_a_number, checks_itself_last, answers_and_stops,
    says_what_it_is, caches_in_one_volume, keeps_its_torch,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfile_keeps_the_rule(file: Path, rule: Callable[[list[Step]], Iterator[str]], tmp_path: Path) -> None:
    assert list(rule(_steps(file.read_text(), tmp_path))) == []


def test_there_is_one_dockerfile_for_each_vendor_and_the_cpu() -> None:
    assert [file.name for file in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "hip.Dockerfile"]


PLANTED = [
    (bases_are_pinned_by_digest, r"@sha256:[0-9a-f]{64}", ""),
    (bases_are_pinned_by_digest, r"(?m)^FROM \$\{BASE\}$", "FROM python:latest"),
    (copy_sources_exist, r"docker/healthcheck.py /opt", "docker/absent.py /opt"),
    (copy_sources_exist, r"COPY graded/", "COPY tests/"),
    (copy_sources_exist, r"--from=wheel", "--from=absent"),
    (runs_as_a_number, r"USER 10001:10001", "USER halocline"),
    (runs_as_a_number, r"USER 10001:10001", "USER 0:0"),
    (runs_as_a_number, r"USER 10001:10001", ""),
    (checks_itself_last, r"halocline doctor --image", "halocline --version # doctor --image"),
    (checks_itself_last, r"(?m)^STOPSIGNAL", "RUN true\nSTOPSIGNAL"),
    (answers_and_stops, r'CMD \["python".*\]', "CMD curl -f localhost:8000"),
    (answers_and_stops, r'ENTRYPOINT \["halocline"\]', "ENTRYPOINT halocline"),
    (answers_and_stops, r"STOPSIGNAL SIGTERM", "STOPSIGNAL SIGKILL"),
    (says_what_it_is, r"image.revision=", "image.ref="),
    (caches_in_one_volume, r'VOLUME \["/cache"\]', ""),
    (caches_in_one_volume, r"HALOCLINE_CACHE_DIR=/cache/halocline", "HALOCLINE_CACHE_DIR=/root/halocline"),
    (keeps_its_torch, r"    PIP_CONSTRAINT=\S+ \\\n    HOME", "    HOME"),
]


@pytest.mark.parametrize(("rule", "pattern", "replacement"), PLANTED)
def test_rule_finds_a_planted_fault(
    rule: Callable[[list[Step]], Iterator[str]], pattern: str, replacement: str, tmp_path: Path
) -> None:
    text = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    changed = re.sub(pattern, replacement.replace("\\", r"\\"), text)
    assert changed != text
    assert list(rule(_steps(changed, tmp_path))) != []


def test_the_cuda_image_installs_by_hash_without_a_resolver_and_trims_what_is_not_needed() -> None:
    text = (ROOT / "docker" / "cuda.Dockerfile").read_text()
    installs = re.findall(r"-m pip (?:install|download)[^&\n]*", text)
    from_index = [line for line in installs if "--no-index" not in line and "tested.txt" not in line]
    assert from_index
    assert all("--require-hashes --no-deps" in line for line in from_index)
    assert set(re.findall(r"--drop '([^']+)'", text)) == {
        "sgl_kernel/flash_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100/*",
    }  # fmt: skip
    assert "prebuild_flashinfer.py norm mhc topk" in text


def test_the_hip_image_takes_torch_triton_and_aiter_from_its_base() -> None:
    given = json.loads((ROOT / "docker" / "metadata" / "rocm.json").read_text())["given"]
    text = (ROOT / "docker" / "hip.Dockerfile").read_text()
    kept = re.search(r"packages\.py given ([^>]+) >", text)
    assert kept is not None
    assert sorted(kept[1].split()) == sorted(row["name"] for row in given)
    assert "--system-site-packages" in text
    assert "torch is built for {built}" in text


# ---- compose ----------------------------------------------------------------------------------------------------


def _service(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())["services"]["halocline"]


@pytest.mark.parametrize("file", COMPOSES, ids=lambda file: file.name)
def test_compose_file_builds_its_dockerfile_and_gives_up_what_is_not_needed(file: Path) -> None:
    service = _service(file)
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert service["build"]["dockerfile"] == f"docker/{file.name.split('.')[1]}.Dockerfile"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert "cache:/cache" in service["volumes"]
    assert service["volumes"][0].endswith(":ro")
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["command"][0] == "serve"


def test_compose_files_give_the_devices_of_their_vendor_and_shared_memory() -> None:
    cuda, hip = _service(ROOT / "docker" / "compose.cuda.yaml"), _service(ROOT / "docker" / "compose.hip.yaml")
    (devices,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert hip["devices"] == ["/dev/kfd", "/dev/dri"]
    assert len(hip["group_add"]) == 2
    assert cuda["shm_size"] == hip["shm_size"] == "16gb"


def test_variables_of_compose_files_are_settings_of_halocline() -> None:
    from dataclasses import fields

    from halocline.hal.settings import PREFIX, Settings

    known = {PREFIX + field.name.upper() for field in fields(Settings) if "parse" in field.metadata}
    named = {name for file in COMPOSES for name in _service(file).get("environment", {})}
    assert named <= known
    assert "HALOCLINE_HIP_BACKEND" in named
