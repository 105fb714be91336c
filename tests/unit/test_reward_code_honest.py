"""Reward ``code``: right programs in the manner of the usual data sets, and their tests. Each is worth 1."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from relax_core.testing.reward_plays import played, rewarded
from relax_envs.rewards.code import Code

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are kept off the network on Linux alone"),
]


def score(program: str, tests: Any, metadata: dict[str, Any] | None = None) -> Any:
    return rewarded(Code, played(f"```python\n{program}\n```", answer=tests, metadata=metadata))


STACK = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self):
        if not self.items: raise IndexError('empty')
        return self.items.pop()
    def is_empty(self): return not self.items
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __repr__(self): return f'Stack({self.items})'
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *items): return cls(items)
    @staticmethod
    def name(): return 'stack'
"""
NODE = """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
def reverse(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
"""
ERRORS = """
class Empty(ValueError):
    def __init__(self, what, code=3):
        super().__init__(what)
        self.code = code
def f(x):
    if x is None: raise TypeError('none')
    if x < 0: raise ValueError('negative', x)
    if x == 0: raise Empty('zero')
    if x == 1: return {}['key']
    if x == 2: return int('x')
    if x == 3: return [][1]
    if x == 4: return 1 / 0
    if x == 5: import json; return json.loads('{')
    return x
"""
HELPERS = "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
ZERO = HELPERS + (
    "def find_zero(xs):\n    low, high = -1.0, 1.0\n    while poly(xs, low) * poly(xs, high) > 0: low *= 2; high *= 2\n"
    "    while high - low > 1e-10:\n        mid = (low + high) / 2\n        if poly(xs, low) * poly(xs, "
    "mid) > 0: low = mid\n"
    "        else: high = mid\n    return low\n"
)

HONEST: dict[str, tuple[str, Any]] = {
    "sets": (
        "def similar(a, b): return tuple(set(a) & set(b))",
        ["assert set(similar((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))", "assert similar([], []) == ()"],
    ),
    "isclose": (
        "import math\ndef area(r): return math.pi * r * r",
        {"test_list": ["assert math.isclose(area(2), 12.566, rel_tol=0.001)"], "test_imports": ["import math"]},
    ),
    "isclose, imported by the program alone": (
        "import math\nfrom math import isclose\ndef area(r): return math.pi * r * r",
        ["assert math.isclose(area(2), 12.566, rel_tol=0.001)", "assert isclose(area(2), 12.566, rel_tol=0.001)"],
    ),
    "a distance": ("def third(x): return x / 3", "assert abs(third(1) - 0.333333) < 1e-5"),
    "rounded": ("def third(x): return x / 3", "assert round(third(1), 3) == 0.333"),
    "any and all": (
        "def divisors(n): return [i for i in range(1, n + 1) if n % i == 0]",
        "assert all(12 % x == 0 for x in divisors(12))\nassert any(x == 4 for x in divisors(12))\n"
        "assert not any(x > 12 for x in divisors(12))",
    ),
    "kinds": (
        "def f(x): return [1, 2.0, 'a', None, True, (1,), {1}, {}, b'', 1j, frozenset()][x]",
        "kinds = [int, float, str, type(None), bool, tuple, set, dict, bytes, complex, frozenset]\n"
        "for i, kind in enumerate(kinds):\n    assert type(f(i)) is kind and isinstance(f(i), kind)",
    ),
    "in place": (
        "def sort(xs): xs.sort()\ndef add(d, k): d[k] = d.pop('a')\ndef grow(s, b): s.add(3); b.extend(b'z')",
        "xs = [3, 1, 2]\nassert sort(xs) is None\nassert xs == [1, 2, 3]\nd = {'a': 1, 'b': 2}\nadd(d, 'c')\n"
        "assert list(d.items()) == [('b', 2), ('c', 1)]\ns, b = {1}, bytearray(b'a')\ngrow(s, b)\n"
        "assert s == {1, 3} and b == bytearray(b'az')",
    ),
    "deep in place": (
        "def rotate(m):\n    m[:] = [list(r) for r in zip(*m[::-1])]\ndef mark(m): m[0][0] = 9",
        "m = [[1, 2], [3, 4]]\nrow = m[0]\nmark(m)\nassert m == [[9, 2], [3, 4]] and row == [9, 2] and m[0] is row\n"
        "rotate(m)\nassert m == [[3, 9], [4, 2]]",
    ),
    "the same object": (
        "def same(xs): return xs\ndef copied(xs): return list(xs)\ndef twice(): x = [1]; return [x, x]",
        "xs = [1]\nassert same(xs) is xs and copied(xs) is not xs and copied(xs) == xs\nt = twice()\n"
        "assert t[0] is t[1]",
    ),
    "a class": (
        STACK,
        "s = Stack()\nassert s.is_empty() and len(s) == 0\ns.push(1).push(2)\nassert not s.is_empty() and len(s) == 2\n"
        "assert list(s) == [1, 2] and s[0] == 1 and s[-1:] == [2] and s.top == 2 and 2 in s and 3 not in s\n"
        "s[0] = 5\nassert str(s) == 'Stack([5, 2])' == f'{s}' and repr(Stack.of(1, 2)) == 'Stack([1, 2])'\n"
        "assert Stack.name() == 'stack' and isinstance(s, Stack) and not isinstance(1, Stack) and hasattr(s, 'pop')\n"
        "assert s == s and s != Stack([5, 2]) and s.items == [5, 2] and type(s).__name__ == 'Stack'\n"
        "s.items = [7]\nassert s.pop() == 7 and s in {s: 1}\ntry:\n    s.pop()\n    assert False\n"
        "except IndexError as error:\n    assert str(error) == 'empty'",
    ),
    "linked nodes": (
        NODE,
        "head = None\nfor v in (3, 2, 1): head = Node(v, head)\nout, node = [], reverse(head)\nwhile node:\n"
        "    out.append(node.val); node = node.next\nassert out == [3, 2, 1] and head.next is None",
    ),
    "a class of the setup": (
        "def chain(pairs): return max(p.b - p.a for p in pairs) + pairs[0].width()",
        {
            "test_setup_code": "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
            "    def width(self): return self.b - self.a",
            "test_list": ["assert chain([Pair(5, 24), Pair(15, 25)]) == 38"],
        },
    ),
    "a subclass of list": (
        "class Bag(list):\n    def total(self): return sum(self)\ndef bag(*xs): return Bag(xs)",
        "b = bag(1, 2)\nassert b == [1, 2] and [1, 2] == b and b != [1] and b.total() == 3 and len(b) == 2\n"
        "b.append(4)\nassert b == [1, 2, 4] and sorted(b) == [1, 2, 4]",
    ),
    "generators": (
        "def count(n):\n    for i in range(n): yield i\ndef endless():\n    i = 0\n    while True:\n        yield i\n"
        "        i += 1",
        "from itertools import islice\nassert list(count(3)) == [0, 1, 2]\ng = endless()\nassert next(g) == 0\n"
        "assert next(g) == 1 and list(islice(g, 2)) == [2, 3]\ng = count(1)\nnext(g)\ntry:\n    next(g)\n"
        "    assert False\nexcept StopIteration: pass\nassert next(g, 'end') == 'end'\n"
        "assert sum(x * x for x in count(4)) == 14",
    ),
    "errors": (
        ERRORS,
        "import json\ndef error(x):\n    try: f(x)\n    except Exception as e: return e\n"
        "assert type(error(-2)) is ValueError and error(-2).args == ('negative', -2)\n"
        "assert isinstance(error(0), Empty) and isinstance(error(0), ValueError) and error(0).code == 3\n"
        "assert type(error(None)) is TypeError and type(error(1)) is KeyError and type(error(2)) is ValueError\n"
        "assert type(error(3)) is IndexError and isinstance(error(4), ArithmeticError) and str(error(0)) == 'zero'\n"
        "try:\n    f(0)\n    assert False\nexcept Empty as e:\n    assert 'zero' in str(e)\n"
        "try:\n    f(5)\n    assert False\nexcept json.JSONDecodeError as e:\n    assert 'Expecting' in str(e)",
    ),
    "pytest": (
        ERRORS,
        "import pytest\nwith pytest.raises(ValueError, match='negative'):\n    f(-1)\n"
        "with pytest.raises(Empty):\n    f(0)\n"
        "assert f(7) == pytest.approx(7.0000001)",
    ),
    "recursion": (
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\ndef nest(n): return [] if n == 0 else [nest(n - 1)]",
        "assert depth(900) == 900\nx, n = nest(60), 0\nwhile x:\n    x, n = x[0], n + 1\nassert n == 60",
    ),
    "methods of texts": (
        "def swap(s): return s.swapcase()",
        "assert swap('Ab').startswith('a') and swap('Ab').lower() == 'ab' and swap('äß').islower() is False\n"
        "assert swap('a,b').split(',') == ['A', 'B'] and len(swap('abc')) == 3 and swap('x')[0] == 'X'",
    ),
    "calls in calls": (
        "def encode(s): return s[::-1]\ndef decode(s): return encode(s)",
        "from random import randint\nfor _ in range(20):\n    s = ''.join(chr(97 + randint(0, 25)) for _ in range(9))\n"
        "    assert decode(encode(s)) == s and encode(s) == s[::-1]",
    ),
    "lambdas": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef compose(f, g): return lambda x: f(g(x))\n"
        "def fold(f, xs, start):\n    for x in xs: start = f(start, x)\n    return start",
        "import operator\nassert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(len, ['a', 'bc']) == [1, 2]\n"
        "assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11 and fold(operator.add, [1, 2], 0) == 3\n"
        "assert apply(str.upper, ['a']) == ['A'] and fold(lambda a, b: a + [b], [1], []) == [1]\nseen = []\n"
        "apply(seen.append, [1, 2])\nassert seen == [1, 2]",
    ),
    "keys": (
        "def last(x): return x[-1]\ndef order(xs, key=None, reverse=False): return sorted(xs, key=key, "
        "reverse=reverse)",
        "assert sorted([(1, 3), (2, 1)], key=last) == [(2, 1), (1, 3)]\nassert max('ab', 'ca', key=last) == 'ab'\n"
        "assert order(['bb', 'a'], key=lambda s: len(s)) == ['a', 'bb'] and order([1, 2], reverse=True) == [2, 1]\n"
        "assert list(map(last, [[1, 2], [3]])) == [2, 3] and list(filter(last, [[0], [1]])) == [[1]]",
    ),
    "decorators": (
        "import functools\ndef memo(f):\n    seen = {}\n    @functools.wraps(f)\n    def inner(*a):\n"
        "        if a not in seen: seen[a] = f(*a)\n        return seen[a]\n    return inner",
        "calls = []\n@memo\ndef fib(n):\n    calls.append(n)\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "assert fib(20) == 6765 and len(calls) == 21 and fib.__name__ == 'fib'",
    ),
    "errors in callbacks": (
        "def safe(f, x):\n    try: return f(x)\n    except ZeroDivisionError: return None\ndef plain(f): return f()",
        "assert safe(lambda x: 1 // x, 0) is None\ndef boom(): raise KeyError('k')\ntry:\n    plain(boom)\n"
        "    assert False\nexcept KeyError as e:\n    assert e.args == ('k',)",
    ),
    "numbers": (
        "def nan(): return float('nan')\ndef inf(s): return s * float('inf')\ndef power(n): return 7 ** n\n"
        "def root(): return 1j ** 2\ndef zero(): return -0.0\ndef exact(): return 0.1 + 0.2",
        "import math\nassert math.isnan(nan()) and nan() != nan() and inf(1) == math.inf and inf(-1) < 0\n"
        "assert power(9000) == 7 ** 9000 and power(30) == 7 ** 30 and root() == -1 and type(root()) is complex\n"
        "assert math.copysign(1, zero()) == -1 and exact() != 0.3 and exact() == 0.30000000000000004",
    ),
    "library values": (
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime as t\n"
        "P = namedtuple('P', 'x y')\ndef f(): return [Counter('aab'), deque([1, 2], 3), OrderedDict(a=1, b=2), "
        "defaultdict(list, a=[1]), Decimal('1.10'), Fraction(1, 3), t.date(2024, 2, 29), t.timedelta(1, 2, 3), "
        "t.datetime(2024, 1, 2, 3, 4, 5, 6), range(3), P(1, 2), {1: 2}.keys(), bytearray(b'a'), t.time(1, 2)]",
        "from collections import *\nfrom decimal import Decimal\nfrom fractions import Fraction\nimport datetime as t\n"
        "a, b, c, d, e, g, h, i, j, k, p, q, r, s = f()\nassert a == Counter('aab') and "
        "a.most_common(1) == [('a', 2)]\n"
        "assert b == deque([1, 2]) and b.maxlen == 3 and c == OrderedDict(a=1, b=2) != OrderedDict(b=2, a=1)\n"
        "assert d == {'a': [1]} and e == Decimal('1.1') and str(e) == '1.10' and g == Fraction(1, 3) and "
        "g.numerator == 1\n"
        "assert h == t.date(2024, 2, 29) and i == t.timedelta(1, 2, 3) and j == t.datetime(2024, 1, 2, 3, 4, 5, 6)\n"
        "assert k == range(3) and p == (1, 2) and p.x == 1 and q == {1} and r == b'a' and s == t.time(1, 2)",
    ),
    "enums and data classes": (
        "from enum import Enum\nfrom dataclasses import dataclass\nclass Colour(Enum):\n    RED = 1\n    BLUE = 2\n"
        "@dataclass\nclass Point:\n    x: int = 0\n    y: int = 0\n    def moved(self, "
        "dx): return Point(self.x + dx, self.y)\n"
        "def mix(c): return Colour.BLUE if c is Colour.RED else Colour.RED",
        "assert mix(Colour.RED) == Colour.BLUE and mix(Colour.BLUE) is Colour.RED and mix(Colour.RED).name == 'BLUE'\n"
        "p = Point(1, y=2).moved(3)\nassert (p.x, p.y) == (4, 2) and str(p) == 'Point(x=4, y=2)'\n"
        "assert [c.value for c in Colour] == [1, 2]",
    ),
    "global values": (
        "LIMIT = 5\nlog = []\ndef f(x): log.append(x); return x < LIMIT",
        "assert LIMIT == 5 and f(3) and not f(7)\nassert log == [3, 7]",
    ),
    "check": (
        "def add(a, b): return a + b",
        "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate(1, 2) == 3, 'message'\n"
        "    for i in range(5):\n        assert candidate(i, i) == 2 * i\n    assert abs(candidate(0.1, "
        "0.2) - 0.3) < 1e-9\n"
        "    assert candidate(b=1, a=2) == 3",
    ),
    "a helper of the program": (
        ZERO,
        "def check(candidate):\n    import math\n    import random\n    rng = random.Random(42)\n"
        "    for _ in range(3):\n"
        "        coeffs = [rng.randint(-10, 10) or 1, 0, 0, rng.randint(1, 10)]\n"
        "        assert math.fabs(poly(coeffs, candidate(list(coeffs)))) < 1e-4",
    ),
    "a test of its own module": (
        "def add(a, b): return a + b\nclass A: pass",
        "from solution import add\nimport solution\nassert add(1, 2) == 3 and solution.add(2, 2) == 4\n"
        "assert isinstance(solution.A(), solution.A)",
    ),
    "a name of Python's": ("def sum(xs):\n    t = 0\n    for x in xs: t += x\n    return t", "assert sum([1, 2]) == 3"),
    "a context": (
        "class Log:\n    def __enter__(self): self.on = True; return self\n    def __exit__(self, *a): self.on = False",
        "with Log() as log:\n    assert log.on\nassert not log.on",
    ),
    "many calls": (
        "def prime(n): return n > 1 and all(n % i for i in range(2, int(n ** 0.5) + 1))",
        "sieve = [True] * 3000\nsieve[0] = sieve[1] = False\nfor i in range(2, 55):\n"
        "    for j in range(i * i, 3000, i): sieve[j] = False\nfor n in range(3000):\n    assert prime(n) == sieve[n]",
    ),
    "a large value": (
        "def f(n): return [[i, str(i)] for i in range(n)]",
        "n = 50000\nassert f(n) == [[i, str(i)] for i in range(n)]",
    ),
    "loops in a value": (
        "def loop(): x = [1]; x.append(x); return x",
        "x = loop()\nassert x[1] is x and x[0] == 1 and len(x) == 2",
    ),
    "output beside it": ("print('hello')\ndef f(x): print(x); return x", "assert f(1) == 1 and f('a' * 999) != ''"),
    "arrays": (
        "import numpy as np\ndef f(n): return np.arange(n) / 2\ndef total(a): return a.sum()",
        "import numpy as np\nassert np.allclose(f(3), [0, 0.5, 1]) and (f(2) == np.array([0, 0.5])).all()\n"
        "assert total(np.ones((2, 2))) == 4.0 and f(3).dtype == float",
    ),
}


@pytest.mark.parametrize(("program", "tests"), HONEST.values(), ids=HONEST.keys())
def test_a_right_program_is_worth_all(program: str, tests: Any) -> None:
    if "numpy" in program:
        pytest.importorskip("numpy")
    names = {"add": "check", "find_zero": "a helper of the program"}
    function = next((name for name in names if f"def {name}(" in program), None)
    assert score(program, tests, {"entry_point": function} if function else None) == 1.0
