"""What is checked, and how: `nox` runs lint, types, the tests of every package, the integration tests and parity.

`nox -l` lists all sessions. Words after `--` go to pytest: `nox -s "tests(kforge-data)" -- -k loader`. Standard
library and nox only; uv makes the environments where it is present, virtualenv and pip where it is not.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "tests", "integration", "parity"]
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # matrix: those that are there

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "tools" / "constraints"
HARNESS = ROOT / "tools" / "testing"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PARITY = ROOT / "tests-integration" / "parity"
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
# Tests of several processes mostly wait, for a start or for each other: two at a time take a little over half.
SIDE_BY_SIDE = ("-n", "2", "--dist", "worksteal")

# Without bytecode each process would compile torch anew, which takes seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PIP_FIND_LINKS" in os.environ:
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))


# ---------------------------------------------------------------------------------------------------- times


class Times:
    """How long each session took, and how much of it was installing; told when nox ends, whatever the outcome."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.rows: list[tuple[str, float, float, str]] = []
        self.installing = 0.0
        atexit.register(self.tell)

    def tell(self) -> None:
        if not self.rows:
            return
        print(f"\n{'session':<28}{'seconds':>9}{'installing':>12}")
        for name, seconds, installing, outcome in self.rows:
            print(f"{name:<28}{seconds:>9.1f}{installing:>12.1f}  {outcome}")
        print(f"{'all':<28}{time.monotonic() - self.start:>9.1f}{sum(row[2] for row in self.rows):>12.1f}", flush=True)


TIMES = Times()


def timed(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(session: nox.Session, *args: Any, **kwargs: Any) -> None:
        start, before, outcome = time.monotonic(), TIMES.installing, "failed"
        try:
            function(session, *args, **kwargs)
            outcome = "passed"
        finally:
            TIMES.rows.append((session.name, time.monotonic() - start, TIMES.installing - before, outcome))

    return run


# ---------------------------------------------------------------------------------------------------- helpers


def project(package: str) -> dict[str, Any]:
    """The [project] table of a package."""
    table: dict[str, Any] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    return table


def siblings(package: str) -> list[str]:
    """The kforge packages that a package declares: none, but for the one where they meet."""
    names = [re.split(r"[^\w-]", line)[0] for line in project(package)["dependencies"]]
    return [name for name in names if name in PACKAGES]


def requirements(packages: Iterable[str]) -> list[str]:
    """What packages and their extras need from elsewhere."""
    lines: set[str] = set()
    for package in packages:
        table = project(package)
        for group in (table["dependencies"], *table.get("optional-dependencies", {}).values()):
            lines |= {line for line in group if re.split(r"[^\w-]", line)[0] not in PACKAGES}
    return sorted(lines)


def wheel(package: str, folder: Path = DIST) -> Path:
    """The wheel of a package in a folder of wheels."""
    found = sorted(folder.rglob(f"{package.replace('-', '_')}-*.whl"))
    if not found:
        raise FileNotFoundError(f"{folder} has no wheel of {package}; `nox -s build` makes them")
    return found[-1]


@functools.cache
def cpu_torch_index() -> str | None:
    """PyTorch's index of CPU builds where it answers: PyPI's build for Linux brings several GB of CUDA along."""
    if sys.platform != "linux" or os.environ.get("PIP_FIND_LINKS"):
        return None
    try:
        urllib.request.urlopen(CPU_TORCH + "/torch/", timeout=5).close()
    except OSError:
        return None
    return CPU_TORCH


def install(session: nox.Session, *args: str, torch: Path = CONSTRAINTS / "torch-cpu.txt") -> None:
    """Install into the session's environment, with the CPU torch of a constraint file."""
    uv = session.venv_backend == "uv"
    flags = ["-c", str(torch), "-c", str(CONSTRAINTS / "checks.txt")]
    if uv:
        # uv keeps wheels by name and version: one built anew under the same version would be the old one.
        flags += [word for name in [*PACKAGES, "kforge-testing"] for word in ("--refresh-package", name)]
    else:
        flags += ["--no-compile"]  # torch has 10,000 files, of which a test imports a tenth: 9 s instead of 30
    if cpu_torch_index():
        flags += ["--torch-backend", "cpu"] if uv else ["--extra-index-url", CPU_TORCH]
    start = time.monotonic()
    try:
        if not uv:
            forget(session)
        session.install(*flags, *args)
    finally:
        TIMES.installing += time.monotonic() - start


def forget(session: nox.Session) -> None:
    """Take our packages out of an environment that is used again: pip would keep one whose version did not change."""
    found = Path(session.virtualenv.location).glob("lib/python*/site-packages/kforge_*-*.dist-info")
    if names := sorted(path.name.split("-")[0] for path in found):
        session.run_install("python", "-m", "pip", "uninstall", "-q", "-y", *names)


def with_extra(package: str, extra: str = "test", folder: Path = DIST) -> str:
    return f"{package}[{extra}] @ {wheel(package, folder).as_uri()}"


def pytest(
    session: nox.Session, *args: str | Path, env: dict[str, str] | None = None, none_is_fine: bool = False
) -> None:
    """Run pytest on paths of the tree from a folder outside it, so that only what is installed can be imported."""
    # Tests make many processes of small tensors: a thread for each is enough.
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(env or {})}
    with tempfile.TemporaryDirectory(prefix="kforge-nox-") as folder, session.chdir(folder):
        config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT))
        codes = [0, 5] if none_is_fine else [0]  # 5: no test was collected
        command = ("python", "-m", "pytest", *config, *map(str, args), *session.posargs)
        session.run(*command, env=env, success_codes=codes)


def build_into(session: nox.Session, folder: Path, *formats: str) -> None:
    """Build every package, and the test harness into a folder below, with the session's hatchling."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = {ROOT / "packages" / package: folder for package in PACKAGES} | {HARNESS: folder / "testing"}
    for source, target in sources.items():
        with session.chdir(source):
            session.run("python", "-m", "hatchling", "build", *formats, "-d", str(target), silent=True)


# ---------------------------------------------------------------------------------------------------- the default


@nox.session
@timed
def lint(session: nox.Session) -> None:
    """Ruff's rules and format, and the import contract: no leaf imports another."""
    install(session, "ruff", "import-linter")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
@timed
def types(session: nox.Session) -> None:
    """Mypy, strict, over every package and tool."""
    install(session, "mypy", *requirements(PACKAGES))
    sources = sorted(str(path) for path in [*ROOT.glob("packages/*/src"), HARNESS / "src"])
    tools = sorted(str(path) for path in ROOT.glob("tools/*.py"))
    session.run("mypy", *sources, *tools, env={"MYPYPATH": os.pathsep.join(sources)})


@nox.session
@timed
def build(session: nox.Session) -> None:
    """The sdist and wheel of each package, into dist/."""
    install(session, "hatchling")
    build_into(session, DIST)


@nox.session(requires=["build"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
@timed
def tests(session: nox.Session, package: str) -> None:
    """One package's tests: its wheel alone with its [test] extra, in a fresh environment."""
    declared = siblings(package)
    install(session, with_extra(package), *(str(wheel(name)) for name in declared), str(wheel("kforge-testing")))
    undeclared = [name.replace("-", "_") for name in PACKAGES if name not in (package, *declared)]
    code = f"import importlib.util as u; exit([n for n in {undeclared} if u.find_spec(n)] or 0)"
    session.run("python", "-c", code, silent=True)
    quick = ("kforge-metrics", "kforge-resilience", "kforge-train")  # done in under a minute as they are
    beside = () if package in quick else SIDE_BY_SIDE
    pytest(session, ROOT / "packages" / package / "tests", "-m", "not gpu", *beside)


@nox.session(requires=["build"])
@timed
def integration(session: nox.Session) -> None:
    """All packages together: the wheels, and the tests that need more than one of them."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    chosen = (ROOT / "tests-integration", f"--ignore={PARITY}", "-m", "not gpu", *SIDE_BY_SIDE)
    pytest(session, *chosen, env={"KFORGE_WHEELS": str(DIST)})


@nox.session(requires=["build"])
@timed
def parity(session: nox.Session) -> None:
    """Layouts of up to 8 processes against one process, and faults that must be found."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    pytest(session, PARITY, "-m", "not gpu", *SIDE_BY_SIDE)


@nox.session(requires=["build"])
@timed
def parity_full(session: nox.Session) -> None:
    """The same with every layout, up to 32 processes, in every variant (KFORGE_KEEP=1 keeps both in benchmarks/)."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    pytest(session, PARITY, "-m", "not gpu", *SIDE_BY_SIDE, env={"KFORGE_PARITY": "full"})


@nox.session(requires=["build"])
@timed
def chaos(session: nox.Session) -> None:
    """200 kills at random moments, where `integration` has 20 (KFORGE_KILLS says how many)."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    kills = os.environ.get("KFORGE_KILLS", "200")
    pytest(session, ROOT / "tests-integration" / "chaos", env={"KFORGE_KILLS": kills})


@nox.session(requires=["build"])
@timed
def mutation(session: nox.Session) -> None:
    """Of the parity session, the planted faults alone."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    pytest(session, PARITY / "test_mutations.py", *SIDE_BY_SIDE)


# ---------------------------------------------------------------------------------------------------- other torches


def host_torch(session: nox.Session) -> tuple[str, str]:
    """Folder and version of a torch on this host that the session's Python can use."""
    ask = """if 1:
        import importlib.metadata, importlib.util, os, sys
        spec = importlib.util.find_spec("torch")
        folder = spec and os.path.dirname(os.path.dirname(spec.origin))
        print(*sys.version_info[:2], folder, spec and importlib.metadata.version("torch"), sep="|")"""
    for python in (os.environ.get("KFORGE_HOST_PYTHON"), sys.executable, shutil.which("python3"), "/usr/bin/python3"):
        if python and shutil.which(python):
            words = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip().split("|")
            if words[:2] == [str(part) for part in sys.version_info[:2]] and words[2] != "None":
                return words[2], words[3]
    session.error(
        f"no Python {sys.version_info[0]}.{sys.version_info[1]} with torch found on this host; run nox with the Python "
        "that has torch, or name that one in KFORGE_HOST_PYTHON"
    )


@nox.session(venv_backend="virtualenv")
@nox.parametrize("package", [*PACKAGES, "all"], ids=[*PACKAGES, "all"])
@timed
def gpu(session: nox.Session, package: str) -> None:
    """Tests marked gpu, on the host's own torch; nothing is downloaded (wheels: KFORGE_WHEELS, or built here)."""
    show_host_torch(session)
    install_on_host_torch(session, PACKAGES if package == "all" else [package, *siblings(package)])
    chosen = [ROOT / "packages" / name / "tests" for name in PACKAGES if package in ("all", name)]
    chosen += [ROOT / "tests-integration"] if package == "all" else []
    pytest(session, *chosen, "-m", "gpu", none_is_fine=package != "all")


@nox.session(venv_backend="virtualenv")
@timed
def gpu_multi(session: nox.Session) -> None:
    """Parity over NCCL on the GPUs of this host (KFORGE_RANKS of them), and jobs that are stopped and killed there."""
    show_host_torch(session)
    device, ranks = os.environ.get("KFORGE_DEVICE", "cuda"), int(os.environ.get("KFORGE_RANKS", "0"))
    if device == "cuda":
        code = "import torch; print(torch.cuda.device_count())"
        there = int(str(session.run("python", "-c", code, silent=True)).split()[-1])
        if there < 2 or ranks > there:
            session.error(
                f"{max(ranks, 2)} GPUs are needed and torch sees {there} here; `nox -s gpu` is for one GPU, and "
                "KFORGE_DEVICE=cpu KFORGE_RANKS=2 runs this session over gloo"
            )
        ranks = ranks or there
    install_on_host_torch(session, PACKAGES)
    env = {"KFORGE_DEVICE": device, "KFORGE_RANKS": str(max(ranks, 2))}
    tests = ROOT / "tests-integration"
    drills = (tests / "test_signals.py", f"{tests / 'test_faults.py'}::test_log_lines_are_those_of_a_run_never_stopped")
    pytest(session, PARITY / "test_devices.py", *drills, "-m", "not gpu", "-rA", env=env)


def show_host_torch(session: nox.Session) -> None:
    """Let the session's Python import the host's torch."""
    torch_folder, version = host_torch(session)
    session.log(f"torch {version} of {torch_folder}")
    site = str(session.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True))
    # An environment made from one does not see the packages of the first; a line of a .pth file shows them.
    Path(site.strip(), "_host_torch.pth").write_text(torch_folder + "\n")


def install_on_host_torch(session: nox.Session, names: Iterable[str]) -> None:
    """Install the wheels of packages and of the test harness, which are built here or lie in KFORGE_WHEELS."""
    folder = Path(os.environ.get("KFORGE_WHEELS") or Path(session.create_tmp(), "wheels")).resolve()
    if "KFORGE_WHEELS" not in os.environ:
        found = session.run("python", "-c", "import importlib.util as u; print(u.find_spec('hatchling'))", silent=True)
        if str(found).strip() == "None":
            session.error(
                "no hatchling here to build wheels with; carry dist/ of `nox -s build`, named in KFORGE_WHEELS"
            )
        build_into(session, folder, "-t", "wheel")
    wheels = [str(wheel(name, folder)) for name in [*names, "kforge-testing"]]
    session.install("--no-index", "--no-deps", "--force-reinstall", *wheels)


@nox.session(requires=["build"])
@timed
def torch211(session: nox.Session) -> None:
    """Multi-process tests on the oldest supported torch, on CPU."""
    install(
        session,
        *(with_extra(package) for package in PACKAGES),
        str(wheel("kforge-testing")),
        torch=CONSTRAINTS / "torch-2.11.txt",
    )
    packages = [ROOT / "packages" / name / "tests" for name in ("kforge-parallel", "kforge-optim", "kforge-ckpt")]
    chosen = (*packages, ROOT / "tests-integration", "-m", "not gpu", *SIDE_BY_SIDE)
    pytest(session, *chosen, env={"KFORGE_WHEELS": str(DIST)})


@nox.session(requires=["build"])
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
@timed
def lowest(session: nox.Session, package: str) -> None:
    """One package's tests with the lowest versions it allows of what it names (torch as in the others; needs uv)."""
    from nox.virtualenv import HAS_UV, UV

    if not HAS_UV:
        session.error("only uv resolves to lowest versions: python -m pip install uv")
    # --find-links on the command line takes the place of UV_FIND_LINKS: name them all.
    folders = [str(DIST), *filter(None, os.environ.get("UV_FIND_LINKS", "").split(","))]
    links = [word for folder in folders for word in ("--find-links", folder)]
    pins = str(Path(session.create_tmp(), "lowest.txt"))
    # The wheel would count as the direct requirement, and what it needs as indirect: resolve its pyproject instead.
    source = str(ROOT / "packages" / package / "pyproject.toml")
    session.run(
        *(UV, "pip", "compile", source, "--extra", "test", "--resolution", "lowest-direct", "-q", "-o", pins),
        *("--no-annotate", "--python", session.python or sys.executable, "--refresh", *links),
        *("-c", str(CONSTRAINTS / "torch-cpu.txt")),
        external=True,
    )
    install(session, *links, "-r", pins, str(wheel(package)), str(wheel("kforge-testing")))
    pytest(session, ROOT / "packages" / package / "tests", "-m", "not gpu")


@nox.session(python=["3.11", "3.12", "3.13"], requires=["build"])
@timed
def matrix(session: nox.Session) -> None:
    """The parts that need no torch (configs, the command line) on each Python found."""
    install(session, "--no-deps", *(str(wheel(package)) for package in PACKAGES))
    install(session, "pytest", "pytest-timeout", "hypothesis")
    names = ("config", "schema", "resolve", "presets", "describe", "cli")
    pytest(session, *(ROOT / "packages" / "kforge-train" / "tests" / f"test_{name}.py" for name in names))
    session.run("python", "-m", "compileall", "-q", *(str(path) for path in ROOT.glob("packages/*/src")))


# ---------------------------------------------------------------------------------------------------- to use it


@nox.session(requires=["build"])
@timed
def bench(session: nox.Session) -> None:
    """Benchmarks that a CPU can run, or those named behind --; each prints a table."""
    install(session, *(with_extra(package) for package in PACKAGES), str(wheel("kforge-testing")))
    every = {path.stem: path for path in sorted(ROOT.glob("benchmarks/*.py")) if not path.stem.startswith("_")}
    for name in session.posargs or [name for name in every if not name.startswith("gpu_")]:
        session.run("python", str(every[name]))


@nox.session(venv_backend="none")
@timed
def quickstart(session: nox.Session) -> None:
    """Make .venv with everything editable, train a first model with it (-- --minutes 30: a larger one)."""
    from nox.virtualenv import HAS_UV, UV

    venv = ROOT / ".venv"
    binaries = venv / ("Scripts" if os.name == "nt" else "bin")
    python = str(binaries / "python")
    start = time.monotonic()
    if not Path(python).exists():
        session.run(*([UV, "venv", "-q"] if HAS_UV else [sys.executable, "-m", "venv"]), str(venv), external=True)
    pip = [UV, "pip", "install", "-q", "--python", python] if HAS_UV else [python, "-m", "pip", "install", "-q"]
    pip += [] if HAS_UV else ["--no-compile", "--disable-pip-version-check"]
    if shutil.which("nvidia-smi") is None:
        pip += ["-c", str(CONSTRAINTS / "torch-cpu.txt")]
        if cpu_torch_index():
            pip += ["--torch-backend", "cpu"] if HAS_UV else ["--extra-index-url", CPU_TORCH]
    # With the build tools in place, eight editable installs need not fetch them eight times.
    session.run(*pip, "hatchling", "editables", external=True)
    paths = [word for package in PACKAGES for word in ("-e", editable(package))]
    session.run(*pip, "--no-build-isolation", *paths, external=True)
    TIMES.installing += time.monotonic() - start
    session.run(str(binaries / "kforge"), "quickstart", *session.posargs, external=True)
    shown = os.path.relpath(binaries, os.getcwd())
    print(
        f"""
Everything is installed, editable, in .venv. Next:
  {shown}/kforge config tiny                  what a job consists of, and where each value comes from
  {shown}/kforge train --help                 every field of a job
  {shown}/kforge quickstart --minutes 30      a larger model, in runs/quickstart-long
  nox                                         the tests""",
        flush=True,
    )


def editable(package: str) -> str:
    extras = "[report]" if "report" in project(package).get("optional-dependencies", {}) else ""
    return f"{ROOT / 'packages' / package}{extras}"
