"""A reader can hold every part in mind: sizes of modules and functions are bounded.

Generated code does not exist here, so a budget that hurts is a sign to split, not to raise it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path.relative_to(ROOT)
    for top in ("shared", "services", "kernels", "deploy", "tests")
    for path in (ROOT / top).rglob("*.py")
)

MODULE_LINES = 400
SERVICE_LINES = 200
MESSAGES_LINES = 800
FUNCTION_LINES = 60
PARAMETERS = 6

EXCEPTIONS: dict[str, str] = {}
"""`path` or `path:function` -> why it may be longer. Empty is right."""


def module_budget(path: Path) -> int:
    if path.match("services/*/service.py"):
        return SERVICE_LINES
    return MESSAGES_LINES if path.match("shared/messages*.py") else MODULE_LINES


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if args and args[0] in {"self", "cls"}:
        args = args[1:]
    return len(args) + len(function.args.kwonlyargs)


def function_faults(path: Path) -> Iterator[str]:
    for function in functions(path):
        if f"{path}:{function.name}" in EXCEPTIONS:
            continue
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{path}:{function.lineno} {function.name} has {lines} lines"
        if parameters(function) > PARAMETERS and path.parts[0] != "kernels":
            yield f"{path}:{function.lineno} {function.name} has {parameters(function)} parameters"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_module_keeps_its_budget(path: Path) -> None:
    """No module is too long to read in one sitting."""
    lines = len((ROOT / path).read_text().splitlines())
    assert str(path) in EXCEPTIONS or lines <= module_budget(path), (
        f"{path} has {lines} lines; the budget is {module_budget(path)}"
    )


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[0] != "tests"], ids=str)
def test_functions_keep_their_budgets(path: Path) -> None:
    """No function needs scrolling, none takes a list of parameters nobody remembers."""
    assert not list(function_faults(path))


def test_a_too_long_function_is_found() -> None:
    """The budget can fail."""
    long = "def f(a, b, c, d, e, g, *, h):\n" + "    pass\n" * FUNCTION_LINES
    (function,) = [n for n in ast.parse(long).body if isinstance(n, ast.FunctionDef)]
    assert parameters(function) == PARAMETERS + 1
    assert function.end_lineno == FUNCTION_LINES + 1
