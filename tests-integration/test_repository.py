"""The repository itself: its layout, the one import rule, public names, and whether each package could be released."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["ckpt", "data", "metrics", "model", "optim", "parallel", "resilience", "train"]
TOP_LEVEL = {
    *("packages", "tests-integration", "benchmarks", "tools"),
    *("noxfile.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore", ".ci"),
}
SESSIONS = {
    *("lint", "types", "tests", "integration", "chaos", "parity", "parity_full", "mutation"),
    *("gpu", "gpu_multi", "torch211", "build", "lowest", "matrix", "bench", "quickstart"),
}


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project(package: str) -> dict:
    return tomllib.loads((ROOT / "packages" / f"kforge-{package}" / "pyproject.toml").read_text("utf-8"))["project"]


def sources(package: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "packages" / f"kforge-{package}" / "src").rglob("*.py")):
        yield path, ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of the modules that a source file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_top_level_is_what_it_should_be() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split()]
    found = {path.name for path in ROOT.iterdir() if not any(fnmatch(path.name, pattern) for pattern in ignored)}
    assert found - {".git"} == TOP_LEVEL
    assert {path.name for path in (ROOT / "packages").iterdir()} == {f"kforge-{package}" for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_its_files(package: str) -> None:
    folder = ROOT / "packages" / f"kforge-{package}"
    module = folder / "src" / f"kforge_{package}"
    for path in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        assert (folder / path).is_file(), path
    for path in ("__init__.py", "_version.py", "config.py", "py.typed"):
        assert (module / path).is_file(), path
    assert list((folder / "tests").glob("test_*.py"))
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_declares_what_the_others_do(package: str) -> None:
    table = project(package)
    assert table["name"] == f"kforge-{package}"
    assert table["requires-python"] == ">=3.11"
    assert table["dynamic"] == ["version"]
    assert "torch>=2.11,<2.16" in table["dependencies"]
    assert "test" in table["optional-dependencies"]
    third_party = [line for line in table["dependencies"] if not line.startswith("kforge-")]
    assert all(">=" in line for line in third_party), "a dependency without a lower bound"
    siblings = {re.split(r"[^\w-]", line)[0] for line in table["dependencies"]} & {f"kforge-{p}" for p in PACKAGES}
    assert siblings == ({f"kforge-{p}" for p in PACKAGES} - {"kforge-train"} if package == "train" else set())


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "train"])
def test_a_leaf_imports_no_other_package(package: str) -> None:
    others = {f"kforge_{other}" for other in PACKAGES if other != package}
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in sources(package)
        for name in imported(tree)
        if name.split(".")[0] in others
    ]
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_private_torch_names_stand_in_one_file(package: str) -> None:
    found = []
    for path, tree in sources(package):
        if path.name == "_torch.py":
            continue
        names = {name for name in imported(tree) if name.startswith("torch.")}
        names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in names if re.match(r"torch\.([\w.]*\.)?_(?!_)", name)}
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(private)]
    assert not found


def test_packages_import_without_torch() -> None:
    modules = [f"kforge_{package}" for package in PACKAGES]
    code = f"import sys; sys.modules.update(torch=None, numpy=None)\nimport {', '.join(modules)}"
    code += f"\nprint({', '.join(f'{module}.__version__' for module in modules)})"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert len(done.stdout.split()) == len(PACKAGES)


def test_every_public_name_has_a_docstring() -> None:
    assert tool("public_names").undocumented() == []


def test_public_names_are_those_of_the_snapshot() -> None:
    names = tool("public_names")
    found = names.differences(names.json.loads(names.SNAPSHOT.read_text("utf-8")), names.names())
    assert not found, "\n".join(["meant? then: python tools/public_names.py --write", *found])


def test_the_readme_quotes_the_kept_results() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert tool("performance").written(readme) == readme, "run python tools/performance.py --write"


def test_several_gpus_have_a_table_once_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    performance = tool("performance")
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert performance.on_several_gpus() == []
    rows = [
        {"row": "fsdp, 4 GPUs", "value": 12000.0, "unit": "tokens/s/GPU", "spread": 50.0, "target": 11400.0},
        {"row": "fsdp, 4 GPUs / one", "value": 0.96, "unit": "ratio", "spread": None, "target": 0.95},
        {"row": "fsdp-fp32, 4 GPUs / by-hand", "value": 0.9, "unit": "time ratio", "spread": None, "target": 1.0},
        {"row": "fsdp, 4 GPUs: mfu", "value": 0.5, "unit": "1", "spread": None, "target": None},
    ]
    rows = [{"better": "lower" if "hand" in row["row"] else "higher", **row} for row in rows]
    rows[0]["parts"] = {"mfu": 0.5, "peak_gb": [70.2, 71.4]}
    environment = {"gpu": "GPU", "torch": "2.13", "date": "today"}
    (tmp_path / "multi_gpu.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    table = performance.on_several_gpus()
    assert "| fsdp, 4 GPUs | 12,000 (50) | 0.96 | 0.95 | 50.0% | 71 |" in table
    assert "| fsdp-fp32, 4 GPUs / by-hand | 0.9 | time ratio | ≤ 1 |" in table
    assert not any("/ one |" in line or "mfu" in line for line in table)


def test_differences_of_public_names_are_told() -> None:
    old = {"kforge_a": {"f": "(x: int)", "g": "()"}}
    new = {"kforge_a": {"f": "(x: float)", "h": "()"}}
    assert tool("public_names").differences(old, new) == [
        'kforge_a.f: was "(x: int)", is "(x: float)"',
        "kforge_a.g: gone",
        'kforge_a.h: new, "()"',
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_could_be_released(package: str) -> None:
    # The nox session names the folder of the wheels that it installed; without one the sources alone are checked.
    dist = os.environ.get("KFORGE_WHEELS")
    assert tool("release").faults(f"kforge-{package}", Path(dist) if dist else None) == []


def test_a_bump_moves_version_and_changelog_together(tmp_path: Path) -> None:
    release = tool("release")
    for package in PACKAGES:
        source, target = (root / "packages" / f"kforge-{package}" for root in (ROOT, tmp_path))
        module = Path("src") / f"kforge_{package}"
        (target / module).mkdir(parents=True)
        for path in ("pyproject.toml", "CHANGELOG.md", module / "_version.py"):
            shutil.copy(source / path, target / path)
    release.ROOT = tmp_path
    old = release.version("kforge-optim")
    new = release.bump("kforge-optim", "patch")
    assert new == release.version("kforge-optim") == release.changelog_versions("kforge-optim")[0] != old
    assert release.tag("kforge-optim") == f"kforge-optim-v{new}"
    assert release.faults("kforge-optim") == []
    # Leaving the minor series must be followed by the bounds of the package that depends on it.
    release.bump("kforge-optim", "minor")
    [fault] = release.faults("kforge-train")
    assert fault.startswith("kforge-train: depends on 'kforge-optim>=0.1,<0.2', but kforge-optim is at 0.2.0")
    (tmp_path / "packages/kforge-optim/CHANGELOG.md").write_text("# Changes\n", "utf-8")
    [fault] = release.faults("kforge-optim")
    assert fault == "kforge-optim: _version.py says 0.2.0, the topmost entry of CHANGELOG.md nothing"


def test_nox_sessions_are_those_promised_with_a_line_each() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    sessions = {
        node.name: ast.get_docstring(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("nox.session") for decorator in node.decorator_list)
    }
    assert set(sessions) == SESSIONS
    assert all(text and len(text.splitlines()) == 1 for text in sessions.values())


def test_ci_runs_the_readme_command_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set "))]
    assert commands == ["python -m pip install nox && nox"]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert commands[0] in readme and commands[0] + " -s quickstart" in readme
