"""Whose a name is that tests use and do not define: Python's, a library's, or the program's."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

_OTHERS = {"np": "numpy", "pd": "pandas", **{name: name for name in ("numpy", "pandas", "pytest", "scipy", "torch")}}
_MODULES = {**{name: name for name in sys.stdlib_module_names}, **_OTHERS}
"""Taken for modules where tests ask for their attributes."""
_LIBRARY = {
    **dict.fromkeys(("isclose", "fabs"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    "reduce": "functools",
    "Decimal": "decimal",
    "Fraction": "fractions",
}
"""What tests compare with and forget to import, where programs usually do."""


@dataclass(frozen=True, slots=True)
class Names:
    """``theirs``: the program's, though Python may have the name. ``ours``: module, and attribute or none, of others.

    All further names are Python's where it has them, else the program's.
    """

    theirs: tuple[str, ...] = ()
    ours: dict[str, tuple[str, str]] = field(default_factory=dict)


def names_in(text: str, function: str | None) -> Names:
    """Whose the free names of tests are. ``function``: the name of what is tested.

    A program must not be able to take names of Python or of a library away from the tests. So such a name is the
    program's only where it is ``function``, or where the tests use no other. Raises ValueError where none can be.
    """
    free, asked, imports = _used(text)
    modules = {name for name in free & asked & _MODULES.keys() if name != function}
    free -= modules
    library = free & _LIBRARY.keys() - {function}
    ours = {name: (_MODULES[name], "") for name in modules}
    if function in free:
        theirs = {function}
    elif imports or any(name not in library and not hasattr(builtins, name) for name in free):
        theirs = set()
    elif len(free) == 1 or (free and free == library):
        theirs, library = free, set()
    else:
        raise ValueError(f"no name in {text.strip()[:60]!r} is the program's: give its function as 'entry_point'")
    return Names(tuple(sorted(map(str, theirs))), ours | {name: (_LIBRARY[name], name) for name in library})


def _used(text: str) -> tuple[set[str], set[str], bool]:
    """Free names, names that are asked for attributes, and whether the program is imported."""
    tables = list(_tables(symtable.symtable(text, "tests", "exec")))
    top = tables[0]
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used = {s.get_name() for t in tables for s in t.get_symbols() if s.is_referenced() and (t is top or s.is_global())}
    nodes = list(ast.walk(ast.parse(text)))
    asked = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    modules = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    modules += [one.name for n in nodes if isinstance(n, ast.Import) for one in n.names]
    return used - bound, asked, "solution" in modules


def _tables(table: symtable.SymbolTable) -> Iterable[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _tables(inner)
