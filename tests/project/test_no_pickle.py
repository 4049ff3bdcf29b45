"""The package uses no serialization that can execute code when it is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
MODULES = frozenset({
    "pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle",
})  # fmt: skip
CALLS = frozenset({("torch", "load"), ("torch", "save"), ("pd", "read_pickle")})


def _refuses_code(call: ast.Call) -> bool:
    """Whether it is `torch.load(..., weights_only=True)`, which executes no code."""
    return any(
        word.arg == "weights_only"
        and isinstance(word.value, ast.Constant)
        and word.value.value is True
        for word in call.keywords
    )


def _unsafe(source: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _refuses_code(node)}
    for node in nodes:
        match node:
            case ast.Attribute() if id(node) in safe:
                continue
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str() as module):
                names = [module]
            case ast.Attribute(value=ast.Name(id=of), attr=name) if (of, name) in CALLS:
                yield f"{of}.{name}"
                continue
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "allow_pickle"
                continue
            case _:
                continue
        yield from (name for name in names if name.partition(".")[0] in MODULES)


def test_no_pickle_in_the_package() -> None:
    files = sorted((CHECKOUT / "src").rglob("*.py"))
    assert files
    found = {
        str(path.relative_to(CHECKOUT)): unsafe
        for path in files
        if (unsafe := list(_unsafe(path.read_text(encoding="utf8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "def f():\n    import marshal as m",
        "from shelve import open",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
    ],
)
def test_pickle_is_found(bad: str) -> None:
    assert list(_unsafe(bad))


def test_refusing_pickle_is_allowed() -> None:
    assert list(_unsafe("np.load(path, allow_pickle=False)\nimport json")) == []
    assert list(_unsafe("torch.load(path, weights_only=True)")) == []
