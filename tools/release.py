"""Releasing one package: is it ready, and which version comes next.

    python tools/release.py check [PACKAGE ...] [--dist FOLDER]   # all packages without names
    python tools/release.py bump PACKAGE major|minor|patch
    python tools/release.py tag PACKAGE                           # checks, then prints the commands to run

A version stands in three places that must say the same: `_version.py`, the topmost entry of CHANGELOG.md, and the tag
`kforge-x-v0.1.0`. With `--dist`, the built wheels and sdists are looked into as well. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "(\d+)\.(\d+)\.(\d+)"$', re.MULTILINE)
ENTRY = re.compile(r"^## \[?(\d+\.\d+\.\d+)\]?(.*)$", re.MULTILINE)


def packages() -> list[str]:
    """Names of all packages."""
    return sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


def module(package: str) -> str:
    """Import name of a package."""
    return package.replace("-", "_")


def version_file(package: str) -> Path:
    """Where a package keeps its version."""
    return ROOT / "packages" / package / "src" / module(package) / "_version.py"


def version(package: str) -> str:
    """Version of a package, as its source says."""
    found = VERSION.search(version_file(package).read_text("utf-8"))
    if found is None:
        raise SystemExit(f'{version_file(package)} has no line __version__ = "X.Y.Z"')
    return ".".join(found.groups())


def changelog_versions(package: str) -> list[str]:
    """Versions in a package's CHANGELOG.md, from the top."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text("utf-8")
    return [found[1] for found in ENTRY.finditer(text)]


def tag(package: str) -> str:
    """Name of the tag of the version that the source says."""
    return f"{package}-v{version(package)}"


def faults(package: str, dist: Path | None = None) -> list[str]:
    """What keeps a package from being released; nothing when it can be."""
    found: list[str] = []
    folder, source = ROOT / "packages" / package, version(package)
    entries = changelog_versions(package)
    if entries[:1] != [source]:
        found.append(f"_version.py says {source}, the topmost entry of CHANGELOG.md {(entries or ['nothing'])[0]}")
    if len(set(entries)) < len(entries):
        found.append("CHANGELOG.md has a version twice")
    table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    if table["project"]["name"] != package:
        found.append(f"pyproject.toml names it {table['project']['name']}")
    for other in packages():
        found += _bound_faults(package, other, table["project"].get("dependencies", []))
    if dist is not None:
        found += wheel_faults(package, dist) + sdist_faults(package, dist)
    return [f"{package}: {fault}" for fault in found]


def _bound_faults(package: str, other: str, lines: list[str]) -> list[str]:
    """A dependency on a sibling must admit the sibling's present version: its minor series and no other."""
    major, minor, _ = version(other).split(".")
    wanted = f"{other}>={major}.{minor},<{major}.{int(minor) + 1}"
    return [
        f"depends on {line!r}, but {other} is at {version(other)}; write {wanted}"
        for line in lines
        if re.split(r"[^\w-]", line)[0] == other and not line.startswith(wanted.partition(",")[0])
    ]


def wheel_faults(package: str, dist: Path) -> list[str]:
    """What is missing from the wheel, or does not belong there."""
    path = dist / f"{module(package)}-{version(package)}-py3-none-any.whl"
    if not path.is_file():
        return [f"{path} does not exist; build it with nox -s build"]
    names = zipfile.ZipFile(path).namelist()
    info = f"{module(package)}-{version(package)}.dist-info/"
    inside = [f"{module(package)}/__init__.py", f"{module(package)}/py.typed", f"{info}METADATA"]
    missing = [name for name in inside if name not in names]
    if not any(name.startswith(info) and "LICENSE" in name for name in names):
        missing.append("LICENSE")
    stray = [name for name in names if not name.startswith((f"{module(package)}/", info)) or "/tests/" in name]
    source = ROOT / "packages" / package / "src"
    sources = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.suffix in (".py", ".toml")]
    missing += sorted(set(sources) - set(names))
    return [f"the wheel lacks {name}" for name in missing] + [f"the wheel holds {name}" for name in stray]


def sdist_faults(package: str, dist: Path) -> list[str]:
    """What is missing from the sdist: it must suffice to build the wheel and to run the tests."""
    stem = f"{module(package)}-{version(package)}"
    path = dist / f"{stem}.tar.gz"
    if not path.is_file():
        return [f"{path} does not exist; build it with nox -s build"]
    with tarfile.open(path) as archive:
        names = archive.getnames()
    inside = ["pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", f"src/{module(package)}/py.typed"]
    return [f"the sdist lacks {name}" for name in inside if f"{stem}/{name}" not in names]


def bumped(old: str, part: str) -> str:
    """The version after `old` when its major, minor or patch part moves."""
    major, minor, patch = map(int, old.split("."))
    following = {
        "major": (major + 1, 0, 0),
        "minor": (major, minor + 1, 0),
        "patch": (major, minor, patch + 1),
    }
    return ".".join(map(str, following[part]))


def bump(package: str, part: str) -> str:
    """Write the next version into `_version.py`, and an entry for it at the top of CHANGELOG.md if it has none."""
    new = bumped(version(package), part)
    path = version_file(package)
    path.write_text(VERSION.sub(f'__version__ = "{new}"', path.read_text("utf-8")), "utf-8")
    changelog = ROOT / "packages" / package / "CHANGELOG.md"
    text = changelog.read_text("utf-8")
    if new not in changelog_versions(package):
        first = ENTRY.search(text)
        at = first.start() if first else len(text)
        changelog.write_text(f"{text[:at]}## {new}\n\n- \n\n{text[at:]}", "utf-8")
    return new


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="is a package ready to be released")
    check.add_argument("packages", nargs="*", metavar="PACKAGE")
    check.add_argument("--dist", type=Path, help="folder of built wheels and sdists to look into")
    bump_command = commands.add_parser("bump", help="move a package to its next version")
    bump_command.add_argument("package", choices=packages(), metavar="PACKAGE")
    bump_command.add_argument("part", choices=("major", "minor", "patch"))
    tag_command = commands.add_parser("tag", help="check, then print the commands that tag a package")
    tag_command.add_argument("package", choices=packages(), metavar="PACKAGE")
    tag_command.add_argument("--dist", type=Path, help="folder of built wheels and sdists to look into")
    args = parser.parse_args()
    if args.command == "bump":
        new = bump(args.package, args.part)
        print(f"{args.package} is at {new}; write its entry in packages/{args.package}/CHANGELOG.md")
        return 0
    names = [args.package] if args.command == "tag" else args.packages or packages()
    unknown = sorted(set(names) - set(packages()))
    if unknown:
        parser.error(f"no package {', '.join(unknown)}; there are {', '.join(packages())}")
    found = [fault for name in names for fault in faults(name, args.dist)]
    if args.command == "tag" and not found:
        existing = subprocess.run(["git", "tag", "--list", tag(names[0])], cwd=ROOT, capture_output=True, text=True)
        if existing.stdout.strip():
            found.append(f"{names[0]}: the tag {tag(names[0])} exists; bump the version first")
    print("\n".join(found) or "\n".join(f"{name} {version(name)}: ready" for name in names))
    if args.command == "tag" and not found:
        print(f"git tag -a {tag(names[0])} -m '{names[0]} {version(names[0])}'\ngit push origin {tag(names[0])}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
