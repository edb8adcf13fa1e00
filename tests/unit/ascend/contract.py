"""How a contract with a source text is written and checked: what we rely on, and why, in a line each."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass

from tests.unit.ascend.source import Source


class BrokenError(AssertionError):
    """Says what was expected and what is there instead."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    why: str


@dataclass(frozen=True, kw_only=True)
class Signature(Contract):
    """``name`` in ``path`` takes exactly these arguments (annotations do not count), or derives from these classes."""

    path: str
    name: str
    takes: str | None = None
    extends: str | None = None

    def check(self, source: Source) -> None:
        node = _node(source, self.path, self.name)
        if self.takes is not None:
            _same(self, _arguments(node), self.takes)
        if self.extends is not None:
            _same(self, ", ".join(ast.unparse(base) for base in node.bases), self.extends)


@dataclass(frozen=True, kw_only=True)
class Says(Contract):
    """``name`` in ``path`` contains these expressions or statements, one after the other. ``if x: ...`` stands for the
    condition alone."""

    path: str
    says: tuple[str, ...]
    name: str = ""

    def check(self, source: Source) -> None:
        node = _node(source, self.path, self.name)
        there, position = _parts(node), (0, 0)
        for wanted in map(_normal, self.says):
            at = min((p for p, text in there if text == wanted and p >= position), default=None)
            if at is None:
                close = difflib.get_close_matches(wanted, sorted({text for _, text in there}), n=3, cutoff=0.3)
                after = f" after line {position[0]}" if position[0] else ""
                found = "\n".join(f"    {text}" for text in close) or "    nothing like it"
                raise BrokenError(
                    f"{self.path}: {self.name or 'module'} does not say{after}\n    {wanted}\nfound:\n{found}\n"
                    f"needed because {self.why}"
                )
            position = at


@dataclass(frozen=True, kw_only=True)
class Only(Contract):
    """``pattern`` is found in these files of vllm_ascend, so often, and nowhere else."""

    pattern: str
    places: dict[str, int]

    def check(self, source: Source) -> None:
        found = {path: len(re.findall(self.pattern, text)) for path, text in source.texts().items()}
        _same(self, {path: count for path, count in found.items() if count}, self.places)


def _same(contract: Contract, found: object, expected: object) -> None:
    if found != expected:
        where = " ".join(str(getattr(contract, key, "")) for key in ("path", "name", "pattern")).strip()
        raise BrokenError(f"{where}: expected\n    {expected}\nfound\n    {found}\nneeded because {contract.why}")


def _node(source: Source, path: str, name: str) -> ast.AST:
    try:
        node = source.module(path).find(name)
    except FileNotFoundError:
        raise BrokenError(f"there is no {path}") from None
    if node is None:
        names = [n.name for n in ast.walk(source.module(path).tree) if hasattr(n, "name")]
        close = difflib.get_close_matches(name.rpartition(".")[2], [n for n in names if n], n=5, cutoff=0.3)
        raise BrokenError(f"{path} has no {name}; it has {', '.join(close) or 'nothing like it'}")
    return node


def _arguments(node: ast.AST) -> str:
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


_BLOCKS = (ast.FunctionDef, ast.ClassDef, ast.With, ast.Try, ast.For, ast.While)


def _parts(node: ast.AST) -> list[tuple[tuple[int, int], str]]:
    parts = []
    for n in ast.walk(node):
        if isinstance(n, ast.If):
            parts.append(((n.lineno, n.col_offset), f"if {ast.unparse(n.test)}:"))
        elif isinstance(n, ast.expr | ast.stmt) and not isinstance(
            n, ast.FunctionDef | ast.ClassDef | ast.With | ast.Try
        ):
            parts.append(((n.lineno, n.col_offset), ast.unparse(n)))
    return parts


def _normal(text: str) -> str:
    if text.startswith("if "):
        return ast.unparse(ast.parse(text)).splitlines()[0]
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except SyntaxError:
        return ast.unparse(ast.parse(text))
