"""Who may import whom: a file imports only lower levels, and the review side never needs torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVEL = {
    "formats": 0, "quantise": 0, "accumulate": 0, "delta": 0, "stats": 0, "residuals": 0, "schedule": 0, "support": 0, "sites": 0, "graphs": 0, "refusals": 1,
    "casts": 1, "reference": 1, "ops": 1,
    "attention": 2, "recorder": 2, "dump": 2, "config": 2, "control": 2,
    "replay": 3, "capture": 3, "session": 3, "review": 3, "ab": 4,
    "ab_progress": 4, "doctor": 4, "cli_text": 4, "cli_live": 4, "cli": 4,
}  # fmt: skip
HOSTS = ("megatron", "transformer_engine", "nvdlfw_inspect")
NO_TORCH = ("dump", "review", "ab", "control", "schedule", "config")


def files() -> list[Path]:
    return sorted((ROOT / "dm_plugin").rglob("*.py"))


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names imported by a file; relative ones as dm_plugin.*."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{a.name}" for a in node.names} | {name}
    return found


def unit(path: Path) -> str:
    return path.relative_to(ROOT / "dm_plugin").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_its_own_level_or_lower(path: Path) -> None:
    name = unit(path)
    if name == "__init__":
        assert not {i for i in imports(path) if i.startswith(("dm_plugin.", "torch", "numpy"))}
        return
    assert name in LEVEL, f"{name} has no level: add it to the table"
    for found in imports(path):
        parts = found.split(".")
        if parts[0] == "dm_plugin" and len(parts) > 1 and parts[1] in LEVEL:
            lazily = name == "support" and parts[1] == "ops"  # asks whether the library is there, at call time only
            assert LEVEL[parts[1]] <= LEVEL[name] or lazily, f"{name} imports {found}"


@pytest.mark.parametrize("path", [p for p in files() if unit(p) in NO_TORCH], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_review_side_never_imports_torch(path: Path) -> None:
    assert not {i for i in imports(path) if i.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_host_frameworks_are_imported_under_integrations_only_and_integrations_by_the_cli_only(path: Path) -> None:
    for found in imports(path):
        assert found.split(".")[0] not in HOSTS, f"{path.name} imports {found}"
        if found.startswith("dm_plugin.integrations"):
            assert unit(path) == "cli", f"{path.name} imports {found}"
            assert found not in imports(path, top_level_only=True)
