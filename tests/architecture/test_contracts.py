"""The rules of the house are checks that can fail: each is broken on purpose in a copy."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("planner", "workers", "hydra_ray", "jobs")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [tool, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def checkout_copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold_and_break(checkout_copy: Path) -> None:
    clean = lint_imports(checkout_copy)
    assert clean.returncode == 0, clean.stdout
    assert "0 broken" in clean.stdout

    violations = {
        "planner/pool.py": "import torch",
        "workers/protocol.py": "import ray",
        "workers/errors.py": "import hydra_ray",
        "hydra_ray/routing.py": "import torch",
    }
    for path, line in violations.items():
        with (checkout_copy / path).open("a") as file:
            file.write(f"\n{line}  # noqa\n")
    broken = lint_imports(checkout_copy)
    assert broken.returncode != 0
    assert "planner.pool -> torch" in broken.stdout
    assert "workers.protocol -> ray" in broken.stdout
    assert "workers.errors -> hydra_ray" in broken.stdout
    assert "hydra_ray.routing -> torch" in broken.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_come_from_this_tree(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)
    assert (ROOT / package / "py.typed").exists()


def tracked_text_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ""}
    paths = [ROOT / line for line in listing.stdout.splitlines()]
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def test_nothing_stops_a_cluster_it_did_not_start() -> None:
    this = Path(__file__).resolve()
    commands = ("ray" + " stop", "pkill", "killall")
    for path in tracked_text_files():
        if path.suffix not in {".py", ".sh", ".yaml"} or path.resolve() == this:
            continue
        text = path.read_text()
        assert not [command for command in commands if command in text], path


def test_every_markdown_link_leads_somewhere() -> None:
    pages = [path for path in tracked_text_files() if path.suffix == ".md"]
    assert pages
    for page in pages:
        for target in relative_links(page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def relative_links(text: str) -> list[str]:
    targets = [part.split(")")[0] for part in text.split("](")[1:]]
    return [t.split("#")[0] for t in targets if t and not t.startswith(("http", "#", "mailto"))]
