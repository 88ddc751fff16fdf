"""The package as a whole: which way its imports run, what it exports, what it imports, what the documents say."""

from __future__ import annotations

import ast
import configparser
import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh import ROOT, output_of

import torch_offload

PACKAGE = ROOT / "torch_offload"

# Each module may import those of the rows before its own, and of its own row nothing but what is named there.
LAYERS = [
    {"errors", "checksum", "interrupts", "tensors", "walk"},
    {"parts"},
    {"report", "device"},
    {"host_memory", "storage"},
    {"mirror", "strategies.base", "strategies.methods", "strategies.scratch", "unreached"},
    {"ledger", "strategies.per_parameter", "strategies.optimizer"},
    {"serving", "strategies.flat_buffer", "strategies.fsdp2", "strategies.megatron_optimizer"},
    {"guard", "strategies"},
    {"barriers"},
    {"transfer"},
    {"copies"},
    {"plan"},
    {"scope"},
    {"measure"},
    {"transition"},
    {"contexts", "snapshot"},
    {"offloader"},
    {"compat", "compat.verl"},
    {"testing.modules", "testing.round_trip", "testing.seams"},
    {"testing", ""},
]
STRATEGIES_MAY_IMPORT = {"errors", "tensors", "parts", "walk"}


def imports_of(name: str, source: str) -> set[str]:
    """The package's own modules that a module imports, by name below the package."""
    parts = name.split(".") if name else []
    is_package = name in ("", "strategies", "testing")
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level + is_package]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            known = all_modules()
            found |= {target} if node.module else set()
            found |= {f"{target}.{each.name}".strip(".") for each in node.names} & known
            found -= {""} if not node.module else set()
    return found


def all_modules() -> set[str]:
    found = pkgutil.walk_packages([str(PACKAGE)], "torch_offload.")
    return {each.name.removeprefix("torch_offload.") for each in found} | {""}


def source_of(name: str) -> str:
    path = PACKAGE / Path(*name.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def violations(sources: dict[str, str]) -> list[str]:
    rank = {name: index for index, names in enumerate(LAYERS) for name in names}
    found = []
    for name, source in sources.items():
        for other in imports_of(name, source):
            if rank[other] >= rank[name]:
                found.append(f"{name} imports {other}")
            if name.startswith("strategies.") and not other.startswith("strategies") and other not in STRATEGIES_MAY_IMPORT:
                found.append(f"{name} imports {other}: a strategy cannot reach what moves bytes")
    return found


def test_imports_run_one_way() -> None:
    assert set().union(*LAYERS) == all_modules()
    assert violations({name: source_of(name) for name in all_modules()}) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("storage", "from .transfer import copy"),
        ("strategies.optimizer", "from ..transfer import copy"),
        ("strategies.base", "from .. import mirror"),
        ("ledger", "from . import guard"),
    ],
)
def test_an_import_the_wrong_way_is_noticed(name: str, line: str) -> None:
    assert violations({name: source_of(name) + "\n" + line + "\n"}) != []


def unexported(namespace: dict[str, object], exported: list[str]) -> set[str]:
    """Public names that come from the package and are not exported, and exports that are not there."""
    ours = {
        name
        for name, value in namespace.items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("torch_offload")
    }
    return ours ^ set(exported)


def test_exports() -> None:
    assert unexported(vars(torch_offload), torch_offload.__all__) == set()
    assert torch_offload.__all__ == sorted(torch_offload.__all__, key=lambda name: name)
    extra = dict(vars(torch_offload), stray=torch_offload.Offloader)
    assert unexported(extra, torch_offload.__all__) == {"stray"}
    assert unexported(vars(torch_offload), [*torch_offload.__all__, "missing"]) == {"missing"}


def fresh(code: str) -> str:
    return output_of(code, warnings="ignore").strip()


OTHERS = {"megatron", "transformer_engine", "bitsandbytes", "torchao", "hypothesis", "transformers", "accelerate"}
FOREIGN = f"import sys; print(sorted({{name.split('.')[0] for name in sys.modules}} & {OTHERS}))"
USE = "import torch, torch_offload\nwith torch_offload.offloaded(torch.nn.Linear(2, 2), device='cpu'): pass\n"


def test_nothing_foreign_is_imported() -> None:
    assert fresh(USE + "import torch_offload.testing\n" + FOREIGN) == "[]"
    assert fresh("import hypothesis\n" + USE + FOREIGN) == "['hypothesis']"


def test_it_works_without_numpy() -> None:
    block = "import sys; sys.modules['numpy'] = None\n"
    check = "m = torch.nn.Linear(2, 2); off = torch_offload.Offloader(m, device='cpu'); off.offload(); v = m.weight.tolist(); "
    check += "off.reload(); print(v == m.weight.tolist())"
    assert fresh(block + USE + check) == "True"
    failed = subprocess.run([sys.executable, "-c", block + "import numpy"], capture_output=True, check=False)
    assert failed.returncode != 0


@pytest.mark.parametrize("name", sorted(all_modules()))
def test_the_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"torch_offload.{name}".strip("."))
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)

    for test in finder.find(module, module.__name__, extraglobs={"torch": torch, **vars(torch_offload)}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_public_names_are_documented() -> None:
    for name in torch_offload.__all__:
        thing = getattr(torch_offload, name)
        assert (thing.__doc__ or "").strip(), name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and callable(value):
                assert (inspect.getdoc(getattr(thing, member)) or "").strip(), f"{name}.{member}"


def test_every_error_is_in_the_tree_that_the_docstring_draws() -> None:
    errors = importlib.import_module("torch_offload.errors")
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__}
    assert set(re.findall(r"\b\w+Error\b", errors.__doc__.split("\n\n")[1])) - {"RuntimeError"} == defined
    for name in defined:
        assert issubclass(getattr(errors, name), errors.OffloadError)


# Documents -------------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_the_readmes_python_runs(index: int) -> None:
    namespace: dict[str, object] = {}
    exec(compile(blocks("python")[index], f"README block {index}", "exec"), namespace)


def test_the_readme_has_its_two_commands() -> None:
    assert len(re.findall(r"<!-- run: job -->\n```sh\n", README)) == 1
    assert len(re.findall(r"<!-- run: tests -->\n```sh\n", README)) == 1
    for command in blocks("sh")[:2]:
        assert "-c constraints.txt" in command


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_names_every_module() -> None:
    for name in {name for name in all_modules() - {""} if not name.startswith(("strategies.", "testing."))}:
        assert f"`{name}" in README, name


def test_pins_and_versions_agree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().split() if "==" in line}
    extras = " ".join(setup["options.extras_require"].values())
    wanted = {re.split(r"[><=]", each)[0] for each in (extras + " " + setup["options"]["install_requires"]).split()}
    assert wanted <= pinned
    assert "+" not in (ROOT / "constraints.txt").read_text()
    assert f"## {torch_offload.__version__}" in (ROOT / "CHANGELOG.md").read_text()
