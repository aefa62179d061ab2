"""The images, as far as they can be known without an engine to build them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helm.chart import defaults, render_case

ROOT = Path(__file__).parents[2]
COMPONENTS = ("api", "worker")
LOCKS = ("api/requirements.lock", "worker/requirements.lock", "worker/requirements-cpu.lock", "api/build.lock")


@dataclass(frozen=True)
class Dockerfile:
    component: str

    @property
    def instructions(self) -> list[tuple[str, str]]:
        text = re.sub(r"\\\n\s*", "", (ROOT / self.component / "Dockerfile").read_text())
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]

    def of(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]

    @property
    def last_stage(self) -> list[tuple[str, str]]:
        start = max(number for number, (name, _) in enumerate(self.instructions) if name == "FROM")
        return self.instructions[start:]

    @property
    def sources(self) -> set[str]:
        """Return what is copied out of the build context."""
        copies = [rest.split() for rest in self.of("COPY") if not rest.startswith("--from")]
        return {source.removeprefix("./") for words in copies for source in words[:-1]}


def context(folder: Path) -> Path:
    """Copy what .dockerignore lets through, and return where it lies."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    hidden = [rule.removeprefix("**/") for rule in rules[1:] if not rule.startswith("!")]
    for rule in rules[1:]:
        if rule.startswith("!"):
            source = ROOT / rule[1:]
            if source.is_dir():
                shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns(*hidden))
            else:
                shutil.copy(source, folder)
    return folder


@pytest.mark.parametrize("component", COMPONENTS)
def test_hadolint_finds_nothing(component: str) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    command = [str(linter), "--config", str(ROOT / "helm" / "hadolint.yaml"), str(ROOT / component / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_a_planted_fault(tmp_path: Path) -> None:
    planted = tmp_path / "Dockerfile"
    planted.write_text("FROM docker.io/library/python\nRUN apt-get install gcc\nENTRYPOINT python\n")
    linter = Path(sys.executable).with_name("hadolint")
    command = [str(linter), "--config", str(ROOT / "helm" / "hadolint.yaml"), "--no-color", str(planted)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert {"DL3006", "DL3015", "DL3025"} <= set(re.findall(r"DL\d+", found))


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_image_runs_the_process_of_the_chart_as_a_numeric_user(component: str) -> None:
    file = Dockerfile(component)
    last = dict(file.last_stage)
    user, _, _ = last["USER"].partition(":")
    assert int(user) == defaults()["podDefaults"]["security"]["runAsUser"] > 0
    (workload, *_) = render_case("default").deployments(component)
    assert [word.strip(' "') for word in last["ENTRYPOINT"].strip("[]").split(",")] == workload.container["command"]
    assert int(last["EXPOSE"]) == workload.container["ports"][0]["containerPort"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_image_writes_where_the_chart_mounts(component: str) -> None:
    environment = " ".join(rest for name, rest in Dockerfile(component).last_stage if name == "ENV")
    image = dict(re.findall(r"([A-Z_]+)=(\S+)", environment))
    (workload, *_) = render_case("default").deployments(component)
    chart = render_case("default").env(workload)
    for name, value in image.items():
        if name in chart:
            assert chart[name] == value, name
    assert image["HOME"] == "/tmp" and "/root" not in environment
    assert "NVIDIA_VISIBLE_DEVICES" not in image


@pytest.mark.parametrize("component", COMPONENTS)
def test_bases_are_arguments_and_nothing_is_added_or_left_unlocked(component: str) -> None:
    file = Dockerfile(component)
    assert not file.of("ADD") and not file.of("HEALTHCHECK")
    stages = {rest.split(" AS ")[1] for rest in file.of("FROM") if " AS " in rest}
    for base in (rest.split(" AS ")[0] for rest in file.of("FROM")):
        assert base == "${PYTHON_IMAGE}" or base in stages or re.fullmatch(r"(dependencies|base)-\$\{DEVICE\}", base)
    (image,) = (rest for rest in file.of("ARG") if rest.startswith("PYTHON_IMAGE="))
    assert re.search(r":3\.11[\w.-]*$", image)
    for command in file.of("RUN"):
        for install in re.findall(r"pip install ([^&]+)", command):
            assert "--require-hashes" in install or "--no-index" in install, install


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_build_context_holds_what_is_copied_and_nothing_more(component: str, tmp_path: Path) -> None:
    folder = context(tmp_path)
    for source in Dockerfile(component).sources:
        assert (folder / source).exists(), source
    names = {path.name for path in folder.iterdir()}
    assert names == {"api", "kernels", "shared", "worker", "pyproject.toml", "README.md", "LICENSE"}
    assert not [path for path in folder.rglob("*") if path.name in {"Dockerfile", "__pycache__", ".env", ".git"}]


def test_no_weights_but_the_bundled_model_s_are_in_the_context(tmp_path: Path) -> None:
    weights = [path.relative_to(tmp_path) for path in context(tmp_path).rglob("*.safetensors")]
    assert all(path.parts[:3] == ("worker", "demo", "models") for path in weights)
    assert sum((tmp_path / path).stat().st_size for path in weights) < 64 * 2**20


@pytest.mark.parametrize("component", COMPONENTS)
def test_what_is_copied_makes_a_process_that_starts_and_writes_nothing(component: str, tmp_path: Path) -> None:
    build = tmp_path / "build"
    build.mkdir()
    folder = context(build)
    for path in list(folder.iterdir()):
        if path.name not in Dockerfile(component).sources:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Half a minute of compression that shows nothing: the process is only asked for its help.
    shutil.rmtree(folder / "worker" / "demo" / "models", ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build_wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(folder)]
    subprocess.run(build_wheel, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    home, site = tmp_path / "home", tmp_path / "site"
    home.mkdir()
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--target", str(site), str(wheel)], check=True, timeout=100
    )
    assert (site / ("worker" if component == "api" else "api")).exists() is False
    before = sorted(site.rglob("*"))
    # The site comes before the environment's own packages, where this project is installed as well.
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    program = (
        f"import {component}, runpy; print({component}.__file__); runpy.run_module('{component}', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site)) and "--redis-url" in done.stdout
    assert sorted(site.rglob("*")) == before and list(home.iterdir()) == []


def pins(lock: str) -> dict[str, str]:
    """Return the version of each package; raises if one has no hash or another form than name==version."""
    text = re.sub(r"\\\n\s*", "", (ROOT / lock).read_text())
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        match = re.fullmatch(r"([a-z0-9][a-z0-9-]*)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+)", line)
        assert match, f"{lock}: {line[:100]}"
        found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_is_pinned_by_hash_and_no_server_is_named(lock: str) -> None:
    assert pins(lock)
    assert not re.search(r"://|--index|--find-links", (ROOT / lock).read_text())


def needed(extras: set[str]) -> list[Requirement]:
    """Return what the project asks for with these extras, on Linux."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    found += [Requirement(text) for extra in extras for text in project["optional-dependencies"][extra]]
    return [one for one in found if not one.marker or one.marker.evaluate({"sys_platform": "linux"})]


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("api/requirements.lock", {"api", "otel"}),
        ("worker/requirements.lock", {"worker", "gpu", "otel"}),
        ("worker/requirements-cpu.lock", {"worker", "otel"}),
    ],
)
def test_a_lock_has_what_the_project_asks_for(lock: str, extras: set[str]) -> None:
    locked = pins(lock)
    for requirement in needed(extras):
        if requirement.name == "torch" and lock.endswith("-cpu.lock"):
            continue  # comes by its own arguments of the build
        assert requirement.specifier.contains(locked[requirement.name.replace("_", "-")]), requirement


def test_the_api_s_image_is_free_of_torch_and_the_cpu_image_of_cuda() -> None:
    heavy = re.compile(r"torch|triton|nvidia|cuda|safetensors|numpy")
    assert not [name for name in pins("api/requirements.lock") if heavy.search(name)]
    assert not [name for name in pins("worker/requirements-cpu.lock") if re.search(r"nvidia|cuda|triton", name)]
    assert pins("worker/requirements.lock")["torch"] in (ROOT / "worker" / "Dockerfile").read_text()


def test_both_images_are_built_by_the_same_tools() -> None:
    assert (ROOT / "api" / "build.lock").read_text() == (ROOT / "worker" / "build.lock").read_text()
